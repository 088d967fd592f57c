"""Lists in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")


def listed(names: Iterable[str]) -> str:
    """Return "A", "A and B" or "A, B and C"."""
    *first, last = list(names) or [""]
    return f"{', '.join(first)} and {last}" if first else last


def number_word(count: int) -> str:
    """Return a small number in letters, a larger one in digits."""
    return _NUMBERS[count] if count < len(_NUMBERS) else str(count)


def counted(count: int, noun: str) -> str:
    """Return "1 seed", "5 seeds" and the like."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
