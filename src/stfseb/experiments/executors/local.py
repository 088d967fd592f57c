"""Runs on this machine: in this process, or in several of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stfseb.experiments.executors.work import Workplace
from stfseb.experiments.run import default_device

if TYPE_CHECKING:
    from pathlib import Path

    from stfseb.experiments.executors.ledger import Ledger

ROUNDS_OF_PLACES = 8  # a population is claimed in pieces of this many times its width


def run_locally(
    ledger: Ledger,
    *,
    device: str | None,
    processes: int | None,
    data_folder: Path | None,
    width: int,
    progress: bool,
) -> float:
    """Do what waits in the ledger on this machine; return the CPU seconds of runs done in this very process."""
    chosen = device or default_device()
    place = Workplace(chosen, data_folder, width, progress, ledger.forgiven)
    size = ROUNDS_OF_PLACES * width if chosen.startswith("cuda") else 1
    for _ in ledger.rounds():
        while ledger.waiting:
            for report in place.do(ledger.chunk(size)):
                ledger.note(report)
    return place.cpu_seconds
