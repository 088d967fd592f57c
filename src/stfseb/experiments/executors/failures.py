"""Failures keep their traceback: `failure.json` in the run's folder, until the run succeeds."""

from __future__ import annotations

import platform
import time
import traceback
from typing import TYPE_CHECKING, Any

from stfseb.errors import StfsebError
from stfseb.files import read_json, write_json

if TYPE_CHECKING:
    from pathlib import Path

FAILURE = "failure.json"
FORMAT = 1


def in_a_line(error: BaseException) -> str:
    """Return an error as one line; the user's own mistakes without the name of their class."""
    text = " ".join(str(error).split())
    return text if isinstance(error, StfsebError) and text else f"{type(error).__name__}: {text}".rstrip(": ")


def describe(error: BaseException | str, stage: str) -> dict[str, Any]:
    """Return what is kept of an error: a line, the traceback, when, where, doing what."""
    from stfseb.experiments.machine import code_version  # which needs torch, and reading failures does not

    line, trace = (error, "") if isinstance(error, str) else (in_a_line(error), _trace(error))
    return {
        "format": FORMAT,
        "error": line,
        "traceback": trace,
        "stage": stage,
        "time": round(time.time()),
        "code": code_version(),
        "machine": {"platform": platform.platform(), "python": platform.python_version()},
    }


def write_failure(folder: Path, described: dict[str, Any]) -> str:
    """Write a failure beside what the run has; return its line. The attempts are counted."""
    before = read_failure(folder) or {}
    write_json(folder / FAILURE, {**described, "attempt": int(before.get("attempt", 0)) + 1})
    return str(described["error"])


def read_failure(folder: Path) -> dict[str, Any] | None:
    """Return a run's last failure, or None."""
    path = folder / FAILURE
    if not path.exists():
        return None
    try:
        found = read_json(path, "failure")
    except StfsebError as error:
        return {"error": str(error), "traceback": "", "attempt": 1}
    return found if isinstance(found, dict) else {"error": f"{path} is damaged", "traceback": "", "attempt": 1}


def forget_failure(folder: Path) -> None:
    """Remove the failure of a run that has succeeded."""
    (folder / FAILURE).unlink(missing_ok=True)


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))
