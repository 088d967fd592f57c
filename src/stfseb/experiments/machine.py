"""What a result must say about where it was made: code, machine, time and memory."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import shlex
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stfseb._version import __version__

if TYPE_CHECKING:
    from types import TracebackType


def code_version() -> dict[str, Any]:
    """Return the package's version and, from a checkout, its commit and whether files were changed.

    An archive of the repository (`git archive`) has its commit written into `_commit.txt`; whether its files were
    changed since nobody knows.
    """
    found: dict[str, Any] = {"version": __version__, "commit": None, "modified": None}
    here = Path(__file__).resolve().parent
    archived = here.parent / "_commit.txt"
    if archived.is_file() and not (commit := archived.read_text().strip()).startswith("$Format"):
        return found | {"commit": commit[:12]}

    def git(*words: str) -> str:
        command = ["git", "-C", str(here), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        if (Path(git("rev-parse", "--show-toplevel")) / "src" / "stfseb").is_dir():
            found["commit"] = git("rev-parse", "--short=12", "HEAD")
            found["modified"] = bool(git("status", "--porcelain", "--untracked-files=normal", "--", str(here.parent)))
    except (OSError, subprocess.SubprocessError):
        pass  # installed from a wheel, or no git: the version alone identifies the code
    return found


def machine(device: torch.device) -> dict[str, Any]:
    """Return the machine in words; no host name, no user name."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "platform": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": f"{device.type}: {name}",
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
    }


def origin(device: torch.device, command: str) -> dict[str, Any]:
    """Return what a file of measurements must say of itself: machine, processor, versions and command."""
    return {"machine": machine(device) | {"processor": processor()}, "code": code_version(), "command": command}


def processor() -> str:
    """Return the processor's own name, which Python does not know on Linux."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def script_command(name: str, settings: dict[str, Any]) -> str:
    """Return the command of a script in `benchmarks/` with all its settings, but for the file that it writes."""
    words = [
        f"--{key.replace('_', '-')}={value}" for key, value in settings.items() if key != "out" and value is not None
    ]
    return shlex.join(["python", f"benchmarks/{name}.py", *words])


class PeakMemory:
    """The most memory a block used beyond what was in use before it, in MB.

    On CUDA the allocator's own count; elsewhere the growth of the process (Linux), sampled 20 times a
    second. `megabytes` is None where neither can be had.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.megabytes: float | None = None

    def __enter__(self) -> PeakMemory:
        _tidy()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
            return self
        self._before = self._peak = _resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.device.type == "cuda":
            self.megabytes = (torch.cuda.max_memory_allocated(self.device) - self._before) / 1e6
            return
        self._stop.set()
        self._thread.join()
        if self._peak:
            self.megabytes = (self._peak - self._before) / 1e6

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            self._peak = max(self._peak, _resident())


def _tidy() -> None:
    """Give back what earlier work has left: it would be freed, or used again, within the block and hide growth."""
    gc.collect()
    with suppress(OSError, AttributeError, TypeError):  # of glibc; others have no such function
        ctypes.CDLL(None).malloc_trim(0)


def _resident() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
