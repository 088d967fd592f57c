"""SIGTERM and Ctrl-C while a run is not in its epochs, which save it themselves: before them, and in its evaluation.

What has been trained is in the run's checkpoint by then, so nothing is written here: the words say what is there.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING

from stfseb.errors import StfsebError
from stfseb.experiments.records import RECORD
from stfseb.training import checkpoint
from stfseb.training.interrupts import stoppable
from stfseb.training.progress import in_epochs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def run_stoppable(file: Path) -> Iterator[None]:
    """Turn a signal within the block into `Interrupted`, with what the run's checkpoint `file` holds."""
    words = cache(lambda: _kept(file))
    with stoppable(lambda: words()[0], lambda: words()[1]):
        yield


def _kept(file: Path) -> tuple[str, str]:
    """Return how far a run is and what of it is kept."""
    if file.with_name(RECORD).exists():
        return "after its evaluation", f"its record is written, in {file.parent}"
    with suppress(StfsebError, KeyError, TypeError):  # another version's, or damaged
        if (found := checkpoint.read(file)) is not None:
            state = found[1]
            epochs, steps = in_epochs(state["epoch"]), f" and {state['steps']} steps" if state["steps"] else ""
            if state["result"]["stopped"]:
                return f"in the evaluation, after {epochs} of training", f"saved in {file}, with all of the training"
            return f"outside of its epochs, after {epochs}{steps}", f"saved in {file}"
    if file.exists():
        return "outside of its epochs", f"the checkpoint {file} cannot be read, remove it"
    return "outside of its epochs", "nothing is saved yet, and it begins anew"
