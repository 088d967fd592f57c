"""`stfseb export`: a saved model as one file for other programs."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from typing import Annotated

import typer

from stfseb.errors import StfsebError


def export(
    model: Annotated[Path, typer.Argument(help="A model folder that 'train' or 'compare' wrote.")],
    onnx: Annotated[Path | None, typer.Option(help="Write ONNX to this file.")] = None,
    program: Annotated[Path | None, typer.Option(help="Write a torch.export program (.pt2) to this file.")] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Monte Carlo samples; by default those of its thresholds.")
    ] = None,
    masks: Annotated[
        str, typer.Option(help="inside: the masks of --seed are constants; input: the caller feeds them.")
    ] = "inside",
    seed: Annotated[int, typer.Option(help="Of the masks (or weights) inside.")] = 0,
    logits: Annotated[bool, typer.Option("--logits", help="Samples as logits instead of probabilities.")] = False,
    network: Annotated[
        Path | None, typer.Option(help="The Python file of the model's network, where that is one of your own.")
    ] = None,
) -> None:
    """Write a saved model as ONNX or as a torch.export program: rows in, S predictions a row and their mean out."""
    if onnx is None and program is None:
        raise StfsebError("nothing to write: give --onnx model.onnx or --program model.pt2")
    from stfseb.experiments.models import load_model
    from stfseb.export import export_onnx, export_program

    method = load_model(model, network)
    values = "logits" if logits else "probabilities"
    for path, write in ((onnx, export_onnx), (program, export_program)):
        if path is not None:
            written = write(method, path, samples, masks, seed=seed, values=values)
            print(f"Written: {written} ({written.stat().st_size / 1e6:.1f} MB)")
