"""The driver's side of a process that does runs (`child`). Imports nothing heavy: Dask workers use it too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE = 30.0  # seconds that a run gets to save itself when the job is interrupted


class WorkerProcess:
    """A process that does runs, in a group of its own so that Ctrl-C is the driver's to pass on."""

    def __init__(self, threads: int = 0) -> None:
        environment = dict(os.environ)
        if threads:
            environment["OMP_NUM_THREADS"] = environment["MKL_NUM_THREADS"] = str(threads)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "stfseb.experiments.executors.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            process_group=0,
        )
        assert self.process.stdout is not None
        self.handle = self.process.stdout.fileno()
        self._rest = b""
        self._gone = False

    def ask(self, request: dict[str, Any]) -> None:
        """Send a request; a process that is dead says so in `replies`."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()

    def replies(self) -> list[dict[str, Any]] | None:
        """Return what has come, after waiting for something to come; None when the process has ended."""
        found = os.read(self.handle, 1 << 16)
        if not found:
            self._gone = True
            return None
        *lines, self._rest = (self._rest + found).split(b"\n")
        return [json.loads(line) for line in lines]

    def answers(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Ask and give the answers as they come; ends early when the process dies."""
        self.ask(request)
        while (found := self.replies()) is not None:
            for reply in found:
                if reply["state"] == "end":
                    return
                yield reply

    @property
    def alive(self) -> bool:
        """Whether the process can be asked."""
        return not self._gone and self.process.poll() is None

    def how_it_ended(self) -> str:
        """Say in words how a dead process ended, with its last line."""
        code = self.process.wait()
        if code < 0:
            name = signal.Signals(-code).name
            return f"was killed ({name}{', out of memory?' if name == 'SIGKILL' else ''})"
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"ended with code {code}" + (f" ({lines[-1][:200]})" if lines else "")

    def interrupt(self) -> None:
        """Ask the process to save what it does and to end."""
        if self.alive:
            self.process.terminate()

    def close(self, patience: float = 0.0) -> None:
        """End the process, after `patience` seconds at the latest."""
        if patience:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        self.process.wait()
        self._errors.close()
