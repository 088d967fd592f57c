"""`stfseb paper`: each table and figure of the paper from its runs, beside the paper's own numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stfseb.errors import StfsebError

_WHAT = (
    "table1, table2, figure1, figure2, dof, context-number, context-source, efficiency; all (of these); "
    "tempered, readings, beyond, samples, tails. Several by commas."
)


def paper(
    what: Annotated[str, typer.Argument(help=_WHAT)],
    tasks: Annotated[str | None, typer.Option(help="Tasks by commas; by default the paper's. mini works too.")] = None,
    methods: Annotated[str | None, typer.Option(help="Methods by commas; by default the table's six.")] = None,
    rows: Annotated[
        str | None,
        typer.Option(help="Rows (or columns) of dof, context-number, context-source, readings and beyond, by commas."),
    ] = None,
    seeds: Annotated[
        str, typer.Option(help="How many (10: seeds 0 to 9), or which, by commas (0,3,5; 7, is seed 7 alone).")
    ] = "10",
    epochs: Annotated[int | None, typer.Option(min=1, help="At most this many; by default the task's own.")] = None,
    context: Annotated[
        str | None,
        typer.Option(help="A data set, 'train' (training images) or 'distorted' (copies of these) as context."),
    ] = None,
    retuned: Annotated[bool, typer.Option(help="dof: also with tau2 chosen anew for each dof, by validation.")] = False,
    out: Annotated[Path, typer.Option(help="The folder of results; what is there is not run again.")] = Path("results"),
    executor: Annotated[str, typer.Option(help="Where runs execute: local or dask.")] = "local",
    processes: Annotated[int | None, typer.Option(min=1, help="Worker processes on this machine.")] = None,
    address: Annotated[str | None, typer.Option(help="Of a Dask scheduler that is running.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda where there is one.")] = None,
    retry_failed: Annotated[bool, typer.Option(help="Run again what has failed before.")] = False,
    report_only: Annotated[bool, typer.Option(help="Run nothing: tables and page from what is there.")] = False,
    runs_only: Annotated[
        bool, typer.Option("--runs-only", help="Only the runs: tables and page come later or elsewhere.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the result.")] = False,
) -> None:
    """Reproduce a table or figure of the paper: its runs, the table beside the paper's, and the report.

    Runs that are on disk are not run again: a command that was stopped goes on where it was. `--tasks mini`
    is the embedded task, for which the paper has no numbers.
    """
    from rich.console import Console

    from stfseb.experiments.paper.plan import ALL, OWN_METHODS, Asked, limited, make_plan, methods_of
    from stfseb.report.reproduce import reproduce

    asked = Asked(
        None if tasks is None else words(tasks),
        None if methods is None else words(methods),
        _seeds(seeds),
        {} if epochs is None else {"epochs": epochs},
        context,
    )
    if report_only and runs_only:
        raise StfsebError("--report-only runs nothing and --runs-only reports nothing: give one of the two")
    chosen = words(what)
    names = tuple(dict.fromkeys(name for word in chosen for name in (ALL if word == "all" else (word,))))
    if retuned and "dof" not in names:
        raise StfsebError(f"--retuned belongs to dof, not to {what}: leave it out")
    own = [name for name in chosen if name in OWN_METHODS]
    if own and methods is not None and methods_of(asked) != ["stfseb"]:
        raise StfsebError(f"--methods {methods}: {own[0]} has its own rows, changes to ST-FS-EB; leave --methods out")
    left_out = [name for name in names if name in OWN_METHODS] if "stfseb" not in methods_of(asked) else []
    if retuned and left_out:
        raise StfsebError(f"--retuned changes ST-FS-EB, which --methods {methods} leaves out: leave --retuned out too")
    plans = [make_plan(name, asked) for name in names if name not in left_out]
    if rows is not None:
        others = [plan.what for plan in plans if plan.what not in OWN_METHODS]
        if others:
            raise StfsebError(f"--rows {rows}: {others[0]} has no rows to choose from; its methods are --methods")
        plans = limited(plans, words(rows))
    console, screen = Console(stderr=True), Console()

    def announce(text: str) -> None:
        if not quiet:
            console.print(text, highlight=False, soft_wrap=True, markup=False)

    if left_out:
        announce(f"left out, as they change ST-FS-EB alone: {', '.join(left_out)}")
    made = reproduce(
        plans,
        out,
        announce=announce,
        report_only=report_only,
        runs_only=runs_only,
        retuned=asked if retuned else None,
        executor=executor,
        processes=processes,
        address=address,
        device=device,
        retry_failed=retry_failed,
        progress=not quiet,
    )
    for grid in made.grids:
        screen.print(grid.to_rich(screen.width))
    for line in made.lines:
        screen.print(line, highlight=False, soft_wrap=True, markup=False)
    if made.failed:
        raise typer.Exit(1)


def words(text: str) -> tuple[str, ...]:
    """Return the words of a list with commas, or say that there are none."""
    found = tuple(word.strip() for word in text.split(",") if word.strip())
    if not found:
        raise StfsebError(f"'{text}' names nothing: give names separated by commas")
    return found


def _seeds(text: str) -> tuple[int, ...]:
    """Read a number of seeds, or a list of them: 3 is 0, 1 and 2; 0,3,5 those; 7, with a comma, the seed 7."""
    try:
        numbers = [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        numbers = []
    if "," not in text and len(numbers) == 1:
        numbers = list(range(numbers[0]))
    if not numbers or min(numbers) < 0 or max(numbers) > 2**31:
        raise StfsebError(
            f"--seeds {text}: give how many (10), or which, separated by commas (0,3,5; seed 0 alone is 0,)"
        )
    return tuple(dict.fromkeys(numbers))
