"""`stfseb bench`: what training costs, and how far that is from the floor."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from typing import Annotated

import typer


def bench(
    tasks: Annotated[str, typer.Option(help="mnist (two-conv net) and cifar10 (six-conv net), by commas.")] = "mnist",
    methods: Annotated[str, typer.Option(help="Methods, separated by commas.")] = "stfseb,mcdropout",
    ways: Annotated[
        str | None,
        typer.Option(help="naive, fit (what training chooses), eager, eager-bf16, graph..., compiled-bf16, by commas."),
    ] = None,
    grow: Annotated[
        bool, typer.Option(help="Also how the first method's cost, trained as 'fit', grows with S, N_c, L and B.")
    ] = False,
    seconds: Annotated[float, typer.Option(min=0, help="Time for each measurement off the GPU.")] = 5.0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda where there is one.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for bench.json and bench.png.")] = None,
) -> None:
    """Measure seconds an epoch, memory and the distance to the floor, against the naive way in the same run."""
    from rich.console import Console

    from stfseb.cli import _device
    from stfseb.commands_paper import words
    from stfseb.experiments.bench import bench as run_bench
    from stfseb.experiments.bench import default_ways
    from stfseb.report.bench import bench_table, write_bench

    console = Console(stderr=True)
    place = _device(device)
    found = run_bench(
        list(words(tasks)),
        list(words(methods)),
        list(words(ways)) if ways else default_ways(place),
        device=place,
        grow=grow,
        seconds=seconds,
        announce=lambda text: console.print(text, highlight=False, soft_wrap=True),
    )
    screen = Console()
    screen.print(bench_table(found["rows"]))
    if out is not None:
        screen.print(f"Figures and plot: {write_bench(found, out)}", highlight=False, soft_wrap=True)
    if all("error" in row for row in found["rows"]):
        raise typer.Exit(1)
