"""A checkpoint: one file that holds a run in the middle of its training. Never pickle.

Tensors are stored as safetensors, everything else as JSON in the header of the same file. The file is written
beside its place, brought to disk (fsync) and renamed: at every moment there is the old one or the new one,
complete. A checksum over all tensors tells damage apart from a good file.
"""

from __future__ import annotations

import json
import math
import tempfile
import zlib
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialise

from stfseb._version import __version__
from stfseb.errors import StfsebError
from stfseb.files import remove_leftovers, write_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

FORMAT = 1
_HEADER = "stfseb checkpoint"
_ODD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def make_ready(path: Path) -> None:
    """Raise a one-line error unless checkpoints can be written at `path`; remove what a killed writer left there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise StfsebError(
            f"checkpoint {path} cannot be written: {error.strerror or error}; choose a folder you may write to"
        ) from error


def write(path: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Put a checkpoint in the place of the one before, atomically."""
    # Copies, because tied parameters share memory, which safetensors refuses.
    stored = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    header = {"format": FORMAT, "stfseb": __version__, "crc32": _checksum(stored), "state": _encoded(state)}
    write_bytes(path, serialise(stored, metadata={_HEADER: json.dumps(header, allow_nan=False)}))


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Return the tensors (on the CPU) and the state of the checkpoint at `path`, None where there is none."""
    if path.is_dir():
        raise StfsebError(f"checkpoint {path} is a folder: give the name of a file")
    try:
        if not path.exists():
            return None
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})[_HEADER])
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  (no mapping)
        if header["format"] > FORMAT:
            raise StfsebError(
                f"checkpoint {path} has format {header['format']} and this is stfseb {__version__}, which reads up to "
                f"{FORMAT}: upgrade stfseb"
            )
        state: dict[str, Any] = _decoded(header["state"])
        sound = header["crc32"] == _checksum(tensors)
    except (OSError, SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
        why = " ".join(str(error).split())[:200]
        raise StfsebError(f"checkpoint {path} cannot be read ({why}): remove it to start over") from error
    if not sound:
        raise StfsebError(f"checkpoint {path} is damaged (its checksum differs): remove it to start over")
    return tensors, state


def _checksum(tensors: dict[str, Tensor]) -> int:
    value = 0
    for name in sorted(tensors):
        value = zlib.crc32(name.encode(), value)
        value = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, value)
    return value


def _encoded(value: Any) -> Any:
    """Return the value with numbers that JSON does not know (NaN and infinities) as {"float": name}."""
    if isinstance(value, dict):
        return {str(key): _encoded(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_encoded(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value


def _decoded(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"float"}:
            return _ODD[value["float"]]
        return {key: _decoded(part) for key, part in value.items()}
    return [_decoded(part) for part in value] if isinstance(value, list) else value
