"""Writing files so that a reader, or a crash, never sees half of one.

A file is written beside its place under the name `.NAME.*.part` and then takes it. Whoever writes holds a lock
(`flock`) on the part, which the kernel releases when its holder dies: an unlocked part is what a killed writer
left, and the next that writes the same file removes it. Where such locks are not to be had (some network mounts,
Windows) a part is called `.NAME.*.unlocked.part`: it may be another's, and is removed when it is a day old.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stfseb.errors import StfsebError

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

if TYPE_CHECKING:
    from collections.abc import Iterator

_PART = ".part"
_UNLOCKED = ".unlocked.part"
_LONG = 24 * 3600.0  # seconds after which an unfinished file without a lock is taken for a leftover
_TURNS = 3  # at making a file that is still there when it is locked


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path` that takes its place when the block ends without an error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path)
        handle, part = _new_part(path)
    except OSError as error:
        raise _cannot_write(path, error, "choose a folder you may write to") from error
    try:
        yield part
        part.chmod(0o666 & ~_umask())
        part.replace(path)
    except OSError as error:
        raise _cannot_write(path, error, "choose another name") from error
    finally:
        part.unlink(missing_ok=True)
        if handle is not None:
            os.close(handle)


def remove_leftovers(path: Path) -> None:
    """Remove the unfinished files that killed writers of `path` left beside it; those being written now stay."""
    with suppress(OSError):  # tidying never stops a write
        with os.scandir(path.parent) as inside:
            names = [e.name for e in inside if e.name.startswith(f".{path.name}.") and e.name.endswith(_PART)]
        for name in names:
            with suppress(OSError):  # gone meanwhile, or of somebody whose files are not ours to touch
                _remove_leftover(path.parent / name)


def _remove_leftover(part: Path) -> None:
    handle = None if fcntl is None or part.name.endswith(_UNLOCKED) else os.open(part, os.O_RDWR)
    try:
        locked = False if handle is None else try_lock(handle)
        if locked or (locked is False and part.stat().st_mtime < time.time() - _LONG):
            part.unlink()
    finally:
        if handle is not None:
            os.close(handle)


def try_lock(handle: int) -> bool | None:
    """Lock an open file for this process; False: this file system has no locks, None: another holds it."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError:
        return False
    return True


def leads_to(path: Path, handle: int) -> bool:
    """Whether the name still belongs to the open file, which another may have removed or replaced."""
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


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
        if fcntl is not None:
            with suppress(OSError):
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


def _new_part(path: Path) -> tuple[int | None, Path]:
    """Make an empty file to write `path` in, and the handle that holds its lock: None where it cannot be locked."""
    for _ in range(_TURNS):
        handle, part = _made(path, _PART)
        try:
            locked = try_lock(handle)
            if locked and leads_to(part, handle) and _others_may_write(part):
                return handle, part
        except BaseException:
            os.close(handle)
            part.unlink(missing_ok=True)
            raise
        os.close(handle)
        part.unlink(missing_ok=True)
        if locked is False:
            break
        # Another writer took it for a leftover between its making and its lock; or locks are of no use here.
    handle, part = _made(path, _UNLOCKED)
    os.close(handle)
    return None, part


def _made(path: Path, suffix: str) -> tuple[int, Path]:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=suffix, dir=path.parent)
    return handle, Path(name)


def _others_may_write(part: Path) -> bool:
    """Tell whether a locked file takes what is written by another handle: not on SMB, where such locks are binding."""
    try:
        with part.open("wb") as file:
            file.write(b".")
            file.flush()
            file.truncate(0)
    except PermissionError:
        return False
    return True


def _cannot_write(path: Path, error: OSError, remedy: str) -> StfsebError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "free some space or choose another disk" if full else remedy
    return StfsebError(f"cannot write {path}: {error.strerror or error}; {remedy}")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
