"""`stfseb predict`: what a saved model says of images of the user's own."""

from __future__ import annotations

import json
import sys
from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from stfseb.errors import StfsebError


def predict(
    model: Annotated[Path, typer.Argument(help="A model folder that 'train' or 'compare' wrote.")],
    inputs: Annotated[list[Path], typer.Argument(help="Image files (PNG, JPEG, ...), folders, or .npy/.npz arrays.")],
    coverage: Annotated[
        float | None, typer.Option(help="Answer this fraction of familiar images; by default the model's own rule.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Monte Carlo samples; by default the task's or the model's.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda where there is one.")] = None,
    network: Annotated[
        Path | None, typer.Option(help="The Python file of the model's network, where that is one of your own.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say for each image its class and the probability, or why the model would rather not say.

    Pictures that cannot be read are named in the end, after the others' results, with exit code 2.
    """
    from stfseb.cli import _check_fraction, _device
    from stfseb.data.pictures import all_unread
    from stfseb.experiments.models import chance_in_words, load_model
    from stfseb.experiments.predict import predict_files, samples_in_words

    if coverage is not None:
        _check_fraction("--coverage", coverage)
    method = load_model(model, network).to(_device(device))
    unread: dict[Path, StfsebError] = {}
    rows = predict_files(method, inputs, samples=samples, coverage=coverage, unread=unread)
    for note in filter(None, (chance_in_words(method, model), samples_in_words(method, samples))):
        print(f"note: {note}", file=sys.stderr)
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        _show(rows, f"{method.label} from {model}")
    if unread:
        sys.stdout.flush()
        raise all_unread(unread, len(rows) + len(unread))


def _show(rows: list[dict[str, Any]], title: str) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from stfseb.experiments.predict import counts_in_words

    table = Table(title=title)
    table.add_column("image", overflow="fold")
    table.add_column("class")
    table.add_column("probability", justify="right")
    sets = "plausible" in rows[0]
    if sets:
        table.add_column("plausible", overflow="fold")
    table.add_column("abstains because it", overflow="fold")
    for row in rows:
        cells = [escape(row["image"]), escape(row["class"]), f"{100 * row['probability']:.1f} %"]
        cells += [escape(", ".join(row["plausible"])) or "none"] if sets else []
        table.add_row(*cells, f"[bold yellow]{escape(row['why'])}[/]" if row["abstains"] else "")
    console = Console()
    console.print(table)
    if len(rows) > 1:
        console.print(counts_in_words(rows), highlight=False)
    console.print(rows[0]["rule"], style="dim", highlight=False, soft_wrap=True)
