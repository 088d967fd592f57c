"""`RESULTS/log.jsonl`: a line whenever a run is begun, done or failed; only ever appended to.

Nothing depends on it. It answers what happened in the night, and whether a run was ever begun after it was done.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

LOG = "log.jsonl"


def note(results: Path, event: str, run: str, **more: Any) -> None:
    """Append a line; one write, so that those of several processes do not mix."""
    line = json.dumps({"time": round(time.time(), 3), "event": event, "run": run, "process": os.getpid(), **more})
    with suppress(OSError):
        handle = os.open(results / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(handle, line.encode() + b"\n")
        finally:
            os.close(handle)


def read_log(results: Path) -> list[dict[str, Any]]:
    """Return the lines that are whole."""
    found = []
    with suppress(FileNotFoundError):
        for line in (results / LOG).read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):
                found.append(json.loads(line))
    return found
