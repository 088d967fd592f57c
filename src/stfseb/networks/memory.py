"""Memory that passes on a CPU use again and again stays with the process between them.

A pass of S samples over a minibatch asks for blocks of tens of megabytes and gives them back at its end. glibc's malloc
maps blocks above 32 MiB anew each time and returns the free end of its heap to the system when that is larger than
64 MiB; at the next pass the kernel clears every page again before it hands it out. On two cores of a virtual
machine that was 24 to 37 % of a training step and 31 to 51 % of a prediction (`benchmarks/memory.py`), for 5
to 18 % more memory at the peak. Inside of `memory_kept` blocks
come from the heap and the heap does not shrink; in the end what is free goes back to the system.

A process has one malloc, so all its threads share the setting; several holders may overlap. A forked process begins
without: what its parent held is not given back there. Nothing is done where
malloc is another (macOS, Windows, musl), or where the user has tuned it (`MALLOC_...`, `GLIBC_TUNABLES`).
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

# mallopt's parameters, from malloc.h, and what stands outside of `memory_kept` once it has been used: glibc adjusts the
# thresholds by itself only until one is set, at most to 32 and 64 MiB, where large blocks bring them soon.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_NEVER = -1
_GLIBCS_OWN = {_MMAP_MAX: 65536, _MMAP_THRESHOLD: 32 << 20, _TRIM_THRESHOLD: 64 << 20}

_lock = threading.Lock()
_holders = 0
_forks = 0  # between this process and the first: what was held before a fork is not this process's to give back


@contextmanager
def memory_kept(worth: bool = True) -> Iterator[None]:
    """Keep freed memory in the process while the block runs; `worth=False` does nothing."""
    libc = _glibc() if worth else None
    if libc is None:
        yield
        return
    here = _forks
    _hold(libc, 1)
    try:
        yield
    finally:
        if here == _forks:
            _hold(libc, -1)


def _hold(libc: Any, change: int) -> None:
    global _holders
    with _lock:
        before, _holders = _holders, _holders + change
        if not before:
            libc.mallopt(_MMAP_MAX, 0)
            libc.mallopt(_TRIM_THRESHOLD, _NEVER)
        elif not _holders:
            _restore(libc)
            libc.malloc_trim(0)


def _restore(libc: Any) -> None:
    for parameter, value in _GLIBCS_OWN.items():
        libc.mallopt(parameter, value)


def _forked() -> None:
    """Begin anew in a forked process: the lock may be held by a thread that is not there, memory by its parent."""
    global _lock, _holders, _forks
    _lock, held, _holders = threading.Lock(), _holders, 0
    _forks += 1
    libc = _glibc() if held else None
    if libc is not None:
        _restore(libc)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


@cache
def _glibc() -> Any:
    """Return the C library where it is glibc on 64 bits and the user has not tuned its malloc, else None."""
    tuned = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(
        key.startswith("MALLOC_") for key in os.environ
    )
    if tuned or sys.maxsize < 2**32 or platform.libc_ver()[0] != "glibc":
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None
