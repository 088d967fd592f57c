"""Many runs of one kind on one card at a time: seeds of a method, or trials of a search.

Each run has its own weights, settings, seed, early stopping and best epoch; a finished run's place goes to the
next. On CUDA every place is a stream of its own, with its step captured; steps of networks of this size leave
much of the card idle, which the other places fill. Elsewhere runs follow one another.

A run's masks come from a generator of its own, so that its result does not depend on its neighbours.
"""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from stfseb.errors import StfsebError
from stfseb.methods.base import Method, check_count
from stfseb.training.batches import Augment, ResidentBatches, as_pair
from stfseb.training.fit import conclude
from stfseb.training.loop import DivergedError, FitResult, Protocol, Training, check_split

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_VALIDATION_ROWS = 1024


@dataclass(frozen=True)
class Member:
    """One run of a population: how to make its method, and its seed."""

    name: str
    make: Callable[[], Method]
    seed: int = 0


@dataclass
class Outcome:
    """A finished run: the trained method and its result, or the error that ended it."""

    member: Member
    method: Method | None
    result: FitResult | None
    error: str = ""


def fit_population(
    members: Iterable[Member],
    train: Any,
    validation: Any,
    *,
    width: int = 3,
    batch_size: int = 128,
    device: str | torch.device = "cpu",
    augment: Augment | None = None,
    prune: Callable[[Member, list[dict[str, Any]]], bool] | None = None,
    **protocol: Any,
) -> Iterator[Outcome]:
    """Train all members, `width` at a time, and yield each as it finishes.

    Args:
        members: the runs, taken as places become free.
        train: (x, y) or an image set; kept on the device once for all runs.
        validation: the same, for early stopping.
        width: places on the card.
        batch_size: minibatch size.
        device: where to train.
        augment: applied to each training minibatch.
        prune: asked after each epoch with the run's history; True ends the run where it is.
        protocol: as in `fit` (epochs, patience, lr, precision, ...).
    """
    check_count(width=width, batch_size=batch_size)
    place = torch.device(device)
    pair, held = as_pair(train, "train"), as_pair(validation, "validation")
    if pair is None or held is None:
        raise StfsebError("a population needs train and validation as (x, y) or image sets, which stay on the device")
    x, y = (part.to(place) for part in pair)
    held_out = ResidentBatches(*held, _VALIDATION_ROWS, 0, place)
    base = Protocol(**protocol)
    waiting = deque(members)
    running: list[_Place] = []
    on_cuda = place.type == "cuda"
    with torch.random.fork_rng(devices=[place] if on_cuda else []):
        while waiting or running:
            while waiting and len(running) < (width if on_cuda else 1):
                member = waiting.popleft()
                batches = ResidentBatches(x, y, batch_size, member.seed, place, augment)
                running.append(_Place(member, batches, held_out, replace(base, seed=member.seed), place))
            for current in list(running):
                if current.step(prune):
                    running.remove(current)
                    yield current.outcome()


class _Place:
    """A place on the card: a stream, and the run that has it."""

    def __init__(
        self,
        member: Member,
        batches: ResidentBatches,
        held_out: ResidentBatches,
        protocol: Protocol,
        place: torch.device,
    ) -> None:
        self.member = member
        self.stream = torch.cuda.Stream(place) if place.type == "cuda" else None
        self.error = ""
        self.epoch = 0
        self.method = member.make().to(place)
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(place))
        with self._here():
            check_split(self.method, batches, "train")
            self.training = Training(self.method, batches, held_out, protocol)
            self._begin()

    def step(self, prune: Callable[[Member, list[dict[str, Any]]], bool] | None) -> bool:
        """Finish the epoch under way and begin the next; return True when the run has ended."""
        with self._here():
            try:
                if not self.error:
                    self.training.finish(self.epoch)
            except DivergedError as error:
                self.error = str(error)
            if self.error:
                return True
            if prune is not None and not self.training.done and prune(self.member, self.training.result.history):
                self.training.result.stopped = "pruned"
            if self.training.done:
                return True
            self._begin()
        return False

    def outcome(self) -> Outcome:
        """Return the run at its best epoch."""
        if self.error:
            return Outcome(self.member, None, None, self.error)
        with self._here():
            result = conclude(self.training, self.training.restore_best())
        if self.stream is not None:
            self.stream.synchronize()
        return Outcome(self.member, self.method, result)

    def _begin(self) -> None:
        self.epoch += 1
        try:
            self.training.begin(self.epoch)
        except DivergedError as error:  # off the GPU every step is checked
            self.error = str(error)

    def _here(self) -> Any:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)
