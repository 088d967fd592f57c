"""The one kind of error that is the user's to mend.

Every message is one line that names the offending value and the remedy; the command line prints it
without a traceback and exits with code 2.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class StfsebError(ValueError):
    """Input that cannot be used, with the value and the remedy in one line."""


class DivergedError(StfsebError):
    """Training, or a fit before it, met a value that is not finite or went the wrong way."""


def unknown(kind: str, name: str, known: Iterable[str]) -> StfsebError:
    """Return the error for an unknown name, with the nearest known one when there is one."""
    names = sorted(set(known))  # sets and tasks share some
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return StfsebError(f"unknown {kind} '{name}': {hint}known are {', '.join(names)}")
