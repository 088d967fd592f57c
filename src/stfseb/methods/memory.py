"""Memory: how much is free, whether it has run out, and how many rows a pass of prediction may take.

A step that cannot fit is refused with a number and not by a crash; a prediction that does not fit goes on in
smaller passes.
"""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from stfseb.errors import StfsebError

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("stfseb")

# Rows of all samples in one pass of prediction: large enough to fill a card, small enough for two CPU cores.
ROWS = {"cpu": 4096, "cuda": 65536}
_USUAL = 3 * 32 * 32  # numbers in a row up to which `ROWS` are meant: activations grow with the image
_SIGNS = (
    "DefaultCPUAllocator",
    "not enough memory",
    "out of memory",
    "Cannot allocate memory",
    "std::bad_alloc",
    "ALLOC_FAILED",
    "could not create a primitive",  # oneDNN's word for it
)


class NoMemoryError(StfsebError):
    """Not even the smallest part of a step, or of a prediction, fits into memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that memory has run out, on a card or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def free_unused() -> None:
    """Give back what a failed attempt has left."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def sized(rows: int, x: Tensor) -> int:
    """Return how many rows like those of `x` take about as much memory as `rows` images of 32 x 32 pixels."""
    return max(1, rows * _USUAL // max(_USUAL, x[:1].numel()))


def fewer(rows: int, samples: int, error: BaseException) -> int:
    """Return half of the rows that did not fit into memory in one pass of prediction, and say so."""
    if rows == 1:
        raise NoMemoryError(
            f"1 row with {samples} sample{'s' * (samples > 1)} does not fit into memory: take fewer Monte Carlo "
            "samples, a smaller network, or a device with more memory"
        ) from error
    log.warning("out of memory in prediction: going on with %d rows at once", rows // 2)
    return rows // 2


def available_bytes(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated on `device`, or None where nobody knows."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    known = [value for value in (_meminfo(), _control_group()) if value is not None]
    return min(known) if known else None


def _meminfo() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _control_group() -> int | None:
    """Return what a container's limit leaves."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = int((folder / "memory.current").read_text(encoding="ascii"))
        return None if limit == "max" else max(0, int(limit) - used)
    except (OSError, ValueError):
        return None
