"""`stfseb search`: a method's settings by random search, with the paper's rule, ours and `level`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stfseb.errors import StfsebError

_GO_ON = "what is finished is kept; the same command goes on from there"

if TYPE_CHECKING:
    from rich.console import Console

    from stfseb.experiments.search.plan import Plan


def search(
    task: Annotated[
        str, typer.Argument(help="A task: mini, mnist, fmnist, cifar10, ... or your own YAML file.")
    ] = "mini",
    method: Annotated[str, typer.Option("--method", "-m", help="The method whose settings are searched.")] = "stfseb",
    trials: Annotated[int, typer.Option(help="Finished trials in all, whoever did them.")] = 300,
    space: Annotated[str, typer.Option(help="paper (as printed) or extended (tau to 1e4 in half decades).")] = "paper",
    epochs: Annotated[
        int | None, typer.Option(min=1, help="At most this many epochs a trial; by default the task's.")
    ] = None,
    finalists: Annotated[
        int,
        typer.Option(help="Train so many of the best short trials as long as the task does, and choose among them."),
    ] = 0,
    width: Annotated[int, typer.Option(min=1, help="Trials trained at a time on a CUDA device.")] = 3,
    storage: Annotated[
        str | None, typer.Option(help="sqlite:///FILE or postgresql://USER:PASSWORD@HOST/DB; workers share it.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the folder of results is made.")] = Path("results"),
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Of the draws; every trial is trained with seed 0.")] = 0,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting that is not searched, NAME=VALUE (num_context=64); repeatable."),
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(help="A data set, 'train' (training images) or 'distorted' (copies of these) as context."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda where there is one.")] = None,
    prune: Annotated[bool, typer.Option(help="End hopeless trials early.")] = True,
    grace: Annotated[int, typer.Option(min=2, help="Seconds after which a silent worker is taken for dead.")] = 60,
    show: Annotated[
        Path | None, typer.Option(help="Only print the outcome of a search: its folder or search.json.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the result.")] = False,
) -> None:
    """Search a method's settings: random draws, trained together, chosen on validation and context images alone.

    The same command again goes on where it was left; started several times at once, on one machine or (with a
    PostgreSQL storage) on many, it is as many workers on one search. With --epochs and --finalists the trials are short
    and make a short list, whose settings are then trained in full.
    """
    from rich.console import Console

    from stfseb.experiments.search.outcome import read_search

    screen = Console()
    if show is not None:
        found = read_search(show)
        _print(screen, found)
        return
    if trials < 1:
        raise StfsebError(f"--trials {trials}: give at least 1")
    from stfseb.cli import _device
    from stfseb.experiments.search.progress import SearchProgress
    from stfseb.experiments.search.pruning import Pruning
    from stfseb.experiments.search.worker import search as run_search
    from stfseb.training.interrupts import Interrupted, stoppable

    plan = plan_of(task, method, space, seed=seed, epochs=epochs, context=context, set_=set_)
    try:
        with (
            stoppable(lambda: "between trials", _GO_ON),
            SearchProgress(Console(stderr=True), show=not quiet) as progress,
        ):
            found = run_search(
                plan,
                trials,
                out,
                storage=storage,
                device=_device(device),
                width=width,
                pruning=Pruning() if prune else None,
                grace=grace,
                watcher=progress,
                finalists=finalists,
            )
    except Interrupted as stop:  # in the middle of training
        raise stop.with_remedy(_GO_ON) from None
    _print(screen, found)
    _print_files(screen, found, out, "Written to")
    if found["study"] != plan.name:
        first = read_search(out / "searches" / plan.name)
        _print_files(screen, first, out, f"The {trials} trials that the finalists are from, in")


def plan_of(
    task: str, method: str, space: str, *, seed: int, epochs: int | None, context: str | None, set_: list[str] | None
) -> Plan:
    """Return the plan of a search by the command's own options."""
    from stfseb.cli import settings_from
    from stfseb.experiments.search.plan import make_plan

    training = {} if epochs is None else {"epochs": epochs}
    settings = settings_from(method, set_)
    return make_plan(task, method, space, seed=seed, training=training, context=context, settings=settings)


def _print_files(screen: Console, found: dict[str, Any], out: Path, where: str) -> None:
    """Write a search's picture, and say which files there are."""
    from stfseb.report.search import write_search_figure

    folder = out / "searches" / found["study"]
    named = ["search.json", "preset.yaml", *(path.name for path in write_search_figure(found, folder))]
    screen.print(f"{where} {folder}: {', '.join(named)}", highlight=False, soft_wrap=True)


def _print(screen: Console, found: dict[str, Any]) -> None:
    from stfseb.report.search import ranks_in_words, search_in_words, search_table

    screen.print(search_table(found, screen.width))
    for line in [*search_in_words(found), *ranks_in_words(found), *(f"note: {note}" for note in found["notes"])]:
        screen.print(line, highlight=False, soft_wrap=True, markup=False)
