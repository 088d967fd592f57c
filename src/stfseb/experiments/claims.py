"""Who does a run: an exclusive lock in the run's folder, which the kernel releases when its holder dies.

The lock is `flock` on `claim.json`, which says in words who holds it. The file alone means nothing: a killed
process leaves it behind, unlocked, and the next one takes it. It is removed by its holder, so whoever locks it
must look whether the name still leads to the file it locked.

Where the file system has no such locks (some network mounts, Windows) a claim is granted unprotected: `shared`
is False, and only one command at a time may work there.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stfseb.errors import StfsebError
from stfseb.files import fcntl, leads_to, try_lock

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

NAME = "claim.json"
_LOOKS = (0.001, 0.02)  # seconds after which a lock that is in the way is tried again


@dataclass
class Claim:
    """A run's folder, held by this process until `release` or its death."""

    path: Path
    handle: int
    shared: bool = True  # others see it
    said: dict[str, Any] = field(default_factory=dict)

    def say(self, **more: Any) -> None:
        """Say more, or something else, to those who look."""
        self.said.update(more)
        if self.handle < 0:
            return
        text = json.dumps(self.said).encode()
        with suppress(OSError):  # a full disk must not stop a claim
            os.pwrite(self.handle, text, 0)
            os.ftruncate(self.handle, len(text))

    def release(self) -> None:
        """Let others have the folder."""
        if self.handle >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self.handle)
            self.handle = -1

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def claim(folder: Path, **said: Any) -> Claim | None:
    """Take a run's folder for this process, or return None when another holds it; never waits for it.

    Args:
        folder: the run's folder; made where it does not exist.
        said: what the claim says beside the host, the process and the time.
    """
    path = folder / NAME
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise StfsebError(f"cannot write to {folder}: {error.strerror or error}; choose another folder") from error
        shared = _lock(handle)
        if shared is None:
            os.close(handle)
            return None
        if not leads_to(path, handle):  # its last holder has removed it meanwhile
            os.close(handle)
            continue
        held = Claim(path, handle, shared)
        held.say(host=socket.gethostname(), process=os.getpid(), since=round(time.time(), 1), **said)
        if shared:
            _sweep(folder)
        return held


def holder(folder: Path) -> dict[str, Any] | None:
    """Return what the holder of a folder says about itself, or None when nobody holds it."""
    try:
        handle = os.open(folder / NAME, os.O_RDONLY)  # whoever may read may look
    except OSError:
        return None
    try:
        if fcntl is None:
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two that look do not disturb each other
        except BlockingIOError:
            said = os.pread(handle, 65536, 0)
            return _read(said)
        except OSError:
            return None
        return None
    finally:
        os.close(handle)


def tidy(folder: Path) -> None:
    """Remove what a killed process left in the folder of a complete run."""
    if (folder / NAME).exists():
        held = claim(folder)
        if held is not None:
            (folder / "checkpoint").unlink(missing_ok=True)
            held.release()


def _read(said: bytes) -> dict[str, Any]:
    try:
        found = json.loads(said)
    except ValueError:  # being written
        return {}
    return found if isinstance(found, dict) else {}


def _lock(handle: int) -> bool | None:
    """Lock a file; False: it cannot be locked on this file system, None: another has it."""
    for pause in _LOOKS:
        locked = try_lock(handle)
        if locked is not None:
            return locked
        time.sleep(pause)  # it may be somebody who only looks (`holder`)
    return try_lock(handle)


def _sweep(folder: Path) -> None:
    """Remove the unfinished files of a killed writer: nobody else writes here while the folder is held."""
    for part in folder.rglob(".*.part"):
        part.unlink(missing_ok=True)
