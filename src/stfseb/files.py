"""Writing files so that a reader, or a crash, never sees half of one."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stfseb.errors import StfsebError

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path` that takes its place when the block ends without an error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    except OSError as error:
        raise StfsebError(
            f"cannot write {path}: {error.strerror or error}; choose a folder you may write to"
        ) from error
    os.close(handle)
    part = Path(name)
    try:
        yield part
        part.chmod(0o666 & ~_umask())
        part.replace(path)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free some space or choose another disk" if full else "choose another name"
        raise StfsebError(f"cannot write {path}: {error.strerror or error}; {remedy}") from error
    finally:
        part.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically and durably."""
    with replacing(path) as part, part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically and durably."""
    write_bytes(path, text.encode())


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold a folder against other savers, of this process or another, where the system has such locks."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise StfsebError(f"cannot write to {folder}: {error.strerror or error}; choose another folder") from error
    try:
        with suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically; numbers that are not finite are refused rather than written as non-JSON."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path, what: str) -> Any:
    """Read JSON, or say in one line what is wrong with the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise StfsebError(f"{what} {path} does not exist") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise StfsebError(
            f"{what} {path} cannot be read ({error}): it is damaged or not one of ours; remove or replace it"
        ) from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
