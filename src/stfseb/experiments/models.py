"""Saved models for the command line, those with a network of the user's own among them."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from stfseb.errors import StfsebError
from stfseb.experiments.records import RECORD
from stfseb.files import read_json
from stfseb.methods.chance import REMEDY, at_chance, classes_of
from stfseb.methods.decisions import HELD_OUT, NLL
from stfseb.methods.saving import described, load
from stfseb.networks import own
from stfseb.networks.registry import own_file

if TYPE_CHECKING:
    from stfseb.data.tasks import Task
    from stfseb.methods.base import Method


def load_model(folder: Path, network: Path | None = None, task: Task | None = None) -> Method:
    """Read a model that `save` wrote, on the CPU.

    A network that came from a Python file is made again by the file `network`, or by that of `task`; a model's folder
    names its file and never leads to running it.
    """
    about = described(folder)
    spec, known = about.get("network"), about.get("provenance")
    spec = spec if isinstance(spec, dict) else {}
    made = own_file(spec)
    if made is None and network is not None:
        if "network" in spec:
            raise StfsebError(f"--network {network}: the model's network is built in: leave --network out")
        raise StfsebError(
            f"--network {network}: the model does not say how its network is made, as one from a task file would: "
            "in Python give a fresh instance, load(path, net=...), see docs/own-network.md"
        )
    if network is None and task is not None and not isinstance(task.network, str):
        network = Path(task.network.path)
    if made is None or network is None:
        return load(folder)
    try:
        shape = known.get("input") if isinstance(known, dict) else None
        net = own.rebuild(spec, network.expanduser().resolve(), shape)
    except StfsebError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StfsebError(
            f"{folder / 'model.json'} does not say how its network is made ({type(error).__name__}: {error}): "
            "it is damaged or was edited"
        ) from error
    return load(folder, net=net)


def chance_in_words(method: Method, folder: Path) -> str:
    """Say that the model read from `folder` is at chance; nothing where it has learnt, or where nobody knows."""
    nll, classes = _validation_nll(method, folder), classes_of(method.likelihood, method._outputs)
    if nll is None or not at_chance(nll, classes):
        return ""
    return (
        f"the model has learnt nothing, its validation NLL is {nll:.3f} and guessing among {classes} classes gives "
        f"{math.log(classes):.3f}: {REMEDY}"
    )


def _validation_nll(method: Method, folder: Path) -> float | None:
    """Return the validation NLL of the epoch that was kept, of older models from the record of their run."""
    with suppress(StfsebError, AttributeError, KeyError, TypeError, ValueError):  # a file that was edited, or another
        known = method.calibration.get(HELD_OUT, {}).get(NLL)
        if known is not None:
            return float(known)
        record = read_json(folder.expanduser().resolve().parent / RECORD, "record")
        settings = json.loads(json.dumps(method.settings.as_dict()))
        # A model may have been copied to beside another's record; older records lack newer settings.
        if record["method"] == method.key and all(settings.get(k) == v for k, v in record["settings"].items()):
            return min((float(entry["validation_nll"]) for entry in record["history"]), default=None)
    return None
