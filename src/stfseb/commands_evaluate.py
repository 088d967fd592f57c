"""`stfseb evaluate`: the metrics of a saved model."""

from __future__ import annotations

import json
import sys
from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from typing import Annotated, Any

import typer

from stfseb.errors import StfsebError


def evaluate(
    model: Annotated[Path, typer.Argument(help="A model folder that 'train' or 'compare' wrote.")],
    task: Annotated[
        str | None, typer.Option(help="Evaluate on this task; by default the one it was trained on.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Monte Carlo samples; by default the task's or the model's.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda where there is one.")] = None,
    network: Annotated[
        Path | None, typer.Option(help="The Python file of the model's own network; by default the task's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Evaluate a saved model: accuracy, NLL, ECE, and how well it tells unfamiliar images apart."""
    from rich.console import Console
    from rich.table import Table

    from stfseb.cli import _device
    from stfseb.data.tasks import load_task, task_names
    from stfseb.evaluation.evaluate import evaluate as evaluate_method
    from stfseb.experiments.models import chance_in_words, load_model
    from stfseb.methods.saving import described

    about = described(model).get("provenance")
    name = task or (about.get("task") if isinstance(about, dict) else None)
    if name is None:
        raise StfsebError("the model does not say on which task it was trained: give --task")
    if task is None and name not in task_names():
        raise StfsebError(f"the model was trained on a task of your own, '{name}': give its file, --task {name}.yaml")
    asked = load_task(name)
    method = load_model(model, network, asked)
    data = asked.load()
    _check_suits(method.provenance, data)
    method.to(_device(device))
    if note := chance_in_words(method, model):
        print(f"note: {note}", file=sys.stderr)
    found = evaluate_method(method, data.test, data.ood, samples=samples or data.task.training["test_samples"])
    if as_json:
        print(json.dumps(found, indent=2))
        return
    table = Table(title=f"{method.label} on {data.task.title} (fractions; NLL in nats)")
    table.add_column("metric")
    table.add_column("value", justify="right")
    for key, value in found.items():
        table.add_row(key, f"{value:.4f}")
    Console().print(table)


def _check_suits(about: dict[str, Any], data: Any) -> None:
    """Raise unless a task has images and classes of the kind that a model was trained on, as far as it says."""
    shape, classes = list(data.test.images.shape[1:]), list(data.class_names)
    if about.get("input", shape) != shape:
        sizes = ["x".join(map(str, size)) for size in (shape, about["input"])]
        raise StfsebError(f"--task {data.task.name} has images of {sizes[0]}, the model takes {sizes[1]}: give another")
    if about.get("class_names", classes) != classes:
        named = [
            ", ".join(names[:3]) + (", ..." if len(names) > 3 else "") for names in (classes, about["class_names"])
        ]
        raise StfsebError(f"--task {data.task.name} has the classes {named[0]}, the model {named[1]}: give another")
