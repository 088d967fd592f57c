"""The entry `network:` of a task: a built-in network by name, or a Python file of the user's own.

Here it is plain data. The file is read for its fingerprint and never run: that is for `stfseb.networks.own`, when a
network is built.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stfseb.errors import StfsebError, unknown

NETWORKS = ("small", "deep")
_WRITTEN = "{file: resnet.py, make: ResNet18}"


@dataclass(frozen=True)
class NetworkFile:
    """A network that a Python file makes."""

    path: str  # absolute
    file: str  # as the task file has it
    make: str  # the class or function that returns the network
    sha256: str  # of the file when the task was read


def parse(value: Any, default: str, base: Path) -> tuple[str | NetworkFile, dict[str, Any]]:
    """Return the network and its settings; relative paths are relative to `base`, the task file's folder."""
    settings = dict(value) if isinstance(value, dict) else {"name": value}
    if "file" in settings:
        return _own(settings, base)
    if "make" in settings:
        raise StfsebError(f"network: make: {settings['make']!r} needs the file that holds it: {_WRITTEN}")
    chosen = str(settings.pop("name", default))
    if chosen not in NETWORKS:
        raise StfsebError(f"{unknown('network', chosen, NETWORKS)}; or give a file of your own, {_WRITTEN}")
    for key in settings:
        if key != "hidden":
            raise unknown("key in network", str(key), ("hidden", "file", "make"))
    return chosen, settings


def with_fingerprint(value: Any, base: Path) -> Any:
    """Return the entry with the fingerprint of its file, where it has one: an edited file is another network."""
    if not isinstance(value, dict) or "file" not in value:
        return value
    return {**value, "sha256": fingerprint(_path(value["file"], base))}


def fingerprint(path: Path) -> str:
    """Return the SHA-256 of a network's file."""
    return hashlib.sha256(read_source(path)).hexdigest()


def read_source(path: Path) -> bytes:
    """Return the content of a network's file, or say in one line why there is none."""
    try:
        if path.is_dir():
            raise StfsebError(f"network file '{path}' is a folder: give the Python file in it that holds the network")
        return path.read_bytes()
    except FileNotFoundError:
        raise StfsebError(f"network file '{path}' does not exist: give the path of a Python file") from None
    except OSError as error:
        raise StfsebError(f"network file '{path}' cannot be read ({error.strerror}): give a Python file") from None


def _own(settings: dict[str, Any], base: Path) -> tuple[NetworkFile, dict[str, Any]]:
    if "name" in settings:
        raise StfsebError(
            f"network: has both name ({settings['name']}) and file ({settings['file']}): leave one of them out"
        )
    file, make = settings.pop("file"), settings.pop("make", None)
    path = _path(file, base)
    if make is None:
        raise StfsebError(f"network: 'make' is missing: name the class or function of {file} that returns the network")
    if not isinstance(make, str) or not make.isidentifier():
        raise StfsebError(f"network: make: {make!r} must be the name of a class or function in {file}")
    for key, entry in settings.items():
        if not isinstance(key, str) or not _is_plain(entry):
            raise StfsebError(
                f"network: {key}: {entry!r} cannot be an argument of {make}: give words, finite numbers, true, false, "
                "or lists and mappings of these"
            )
    return NetworkFile(str(path), str(file), make, fingerprint(path)), settings


def _path(file: Any, base: Path) -> Path:
    if not isinstance(file, str) or not file:
        raise StfsebError(f"network: file: {file!r} must be the path of a Python file")
    return (base / Path(file).expanduser()).resolve()


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(entry) for key, entry in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))
