"""Every source of random numbers that a step of training may draw from, as tensors, and the way back.

torch's default generators are seeded by the epoch; what a user's data set, sampler or module draws from Python's
or numpy's global generators, or from a generator of its DataLoader, goes on from where it was.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from stfseb.training.batches import LoaderBatches

if TYPE_CHECKING:
    from torch import Tensor

    from stfseb.training.batches import Batches


def states(device: torch.device, batches: Batches) -> dict[str, Tensor]:
    """Return the state of every source."""
    found = {"torch": torch.get_rng_state()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    _, words, gauss = random.getstate()
    found["python"] = torch.tensor(words, dtype=torch.int64)
    if gauss is not None:
        found["python_gauss"] = torch.tensor(gauss, dtype=torch.float64)
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002  (users' code draws from it)
    found["numpy"] = torch.from_numpy(np.asarray(keys).astype(np.int64))
    found["numpy_rest"] = torch.tensor([position, has_gauss, cached], dtype=torch.float64)
    return found | {f"loader{i}": g.get_state() for i, g in enumerate(_generators(batches))}


def put_back(found: dict[str, Tensor], device: torch.device, batches: Batches) -> None:
    """Set every source to a state that `states` returned."""
    torch.set_rng_state(found["torch"])
    if device.type == "cuda" and "cuda" in found:
        torch.cuda.set_rng_state(found["cuda"], device)
    gauss = float(found["python_gauss"]) if "python_gauss" in found else None
    random.setstate((3, tuple(found["python"].tolist()), gauss))
    position, has_gauss, cached = found["numpy_rest"].tolist()
    keys = found["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), cached))  # noqa: NPY002
    for i, generator in enumerate(_generators(batches)):
        if f"loader{i}" in found:
            generator.set_state(found[f"loader{i}"])


def _generators(batches: Batches) -> list[torch.Generator]:
    """Return the generators that a user gave to a DataLoader or to its sampler."""
    if not isinstance(batches, LoaderBatches):
        return []
    loader: Any = batches.loader
    owners = (loader, loader.sampler, loader.batch_sampler)
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())
