"""Many runs on many cards, simulated: how long it takes, and where the time goes.

A card is a server that its runs share: three at a time take as long as one after the other, which is what was measured.
Before runs of a kind, every place on a card compiles and captures their step, one place after the other. Phases
follow each other, as commands and calls of `run_jobs` do; within a phase cards take work as the executors hand it out:

- runs: chunks of one group from the front of the queue, of the size that the executor gives (`chunk_size`);
- claims (a search): a card stays with its search, claiming `width` trials at a time, and then goes to the search with
  the most work left for each card that is already there.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stfseb.experiments.executors.local import ROUNDS_OF_PLACES

if TYPE_CHECKING:
    from collections.abc import Sequence

CARDS_OF_A_MACHINE = 8  # with more, runs are handed out by Dask


@dataclass(frozen=True)
class Run:
    """A run's card seconds, those that a place needs before its first step, and what the compiled step is made for."""

    seconds: float
    set_up: float = 0.0
    kind: str = ""
    epochs: float = 0.0


@dataclass(frozen=True)
class Phase:
    """Runs between which nobody waits; the next phase begins when all are done."""

    name: str
    groups: dict[str, list[Run]]  # runs that may be trained together
    width: int = 3
    claims: bool = False
    alone: bool = False  # one run at a time, however many cards there are

    @property
    def seconds(self) -> float:
        """Card seconds of the runs alone."""
        return sum(run.seconds for runs in self.groups.values() for run in runs)


@dataclass
class Simulated:
    """Times in seconds; `work`, `set_up` and `start` are summed over cards."""

    cards: int
    makespan: float = 0.0
    work: float = 0.0
    set_up: float = 0.0
    start: float = 0.0
    ends: dict[str, float] = field(default_factory=dict)  # by phase
    longest: dict[str, float] = field(default_factory=dict)  # by phase: what one card had at once, from start to end

    @property
    def efficiency(self) -> float:
        """The runs' own card time over all that was held."""
        return self.work / (self.cards * self.makespan) if self.makespan else 1.0


def simulate(phases: Sequence[Phase], cards: int, *, again: float = 1.0, start: float = 10.0) -> Simulated:
    """Simulate phases on cards.

    Args:
        phases: what is done, in order.
        cards: how many.
        again: what part of the set-up is paid by a later chunk of a kind that the same process had before: 1 if
            nothing is kept between chunks, 0 if everything is.
        start: seconds of a new process until it can set up a run.
    """
    found = Simulated(cards)
    for phase in phases:
        before = found.makespan
        (_search if phase.claims else _runs)(phase, found, again, start)
        found.work += phase.seconds
        found.ends[phase.name] = found.makespan
        found.longest.setdefault(phase.name, found.makespan - before)
    return found


def chunk_size(waiting: int, cards: int, width: int) -> int:
    """Return how many runs an executor gives to a card: in one process, in several on a machine, or by Dask."""
    if cards == 1:
        return ROUNDS_OF_PLACES * width
    if cards <= CARDS_OF_A_MACHINE:
        return max(width, min(ROUNDS_OF_PLACES * width, waiting // (2 * cards)))
    return width


def _runs(phase: Phase, found: Simulated, again: float, start: float) -> None:
    queue = [(name, run) for name, runs in phase.groups.items() for run in runs]
    free = [(found.makespan, card) for card in range(1 if phase.alone else found.cards)]
    seen: dict[int, set[str]] = {}  # kinds that a card's process has had
    taken, longest = 0, 0.0
    while taken < len(queue):
        now, card = heapq.heappop(free)
        size = 1 if phase.alone else chunk_size(len(queue) - taken, found.cards, phase.width)
        chunk = [run for name, run in queue[taken : taken + size] if name == queue[taken][0]]
        taken += len(chunk)
        begun = 0.0 if card in seen else start
        had = seen.setdefault(card, set())
        set_up = sum(run.set_up * (again if run.kind in had else 1.0) for run in to_set_up(chunk, [], phase.width))
        had.update(run.kind for run in chunk)
        lasts = begun + set_up + sum(run.seconds for run in chunk)
        found.start, found.set_up = found.start + begun, found.set_up + set_up
        found.makespan = max(found.makespan, now + lasts)
        longest = max(longest, lasts)
        heapq.heappush(free, (now + lasts, card))
    found.longest[phase.name] = longest


def _search(phase: Phase, found: Simulated, again: float, start: float) -> None:
    del again  # a worker keeps its steps for as long as its search lasts, and then ends
    left = {name: list(runs) for name, runs in phase.groups.items()}
    rest = {name: sum(run.seconds for run in runs) for name, runs in left.items()}
    there = Counter[str]()  # cards by search
    places: dict[int, list[str]] = {}  # by card: the kinds of its captured steps
    free = [(found.makespan, card, "") for card in range(found.cards)]
    longest = 0.0
    while any(left.values()):
        now, card, name = heapq.heappop(free)
        begun = 0.0
        if not left.get(name):
            there[name] -= 1
            name = max((key for key in left if left[key]), key=lambda key: rest[key] / (there[key] + 1))
            there[name] += 1
            places[card], begun = [], start
        claimed, left[name] = left[name][: phase.width], left[name][phase.width :]
        set_up = sum(run.set_up for run in to_set_up(claimed, places[card], phase.width))
        work = sum(run.seconds for run in claimed)
        rest[name] -= work
        lasts = begun + set_up + work
        found.start, found.set_up = found.start + begun, found.set_up + set_up
        found.makespan = max(found.makespan, now + lasts)
        longest = max(longest, lasts)
        heapq.heappush(free, (now + lasts, card, name))
    found.longest[phase.name] = longest


def to_set_up(runs: Sequence[Run], places: list[str], width: int) -> list[Run]:
    """Return the runs that find no free step of their kind, as a population's places are filled; `places` is updated.

    A place goes to the next run with its captured step if that is of the run's kind; else a free one is dropped.
    """
    found = []
    for first in range(0, len(runs), width):
        used = []
        for run in runs[first : first + width]:
            if run.kind in places:
                places.remove(run.kind)
            else:
                found.append(run)
                if places:
                    places.pop(0)
            used.append(run.kind)
        places += used
        del places[:-width]
    return found
