"""Many runs of one kind on one card at a time: seeds of a method, or trials of a search.

Each run has its own weights, settings, seed, early stopping and best epoch; a finished run's place goes to the
next, and with it the captured step, which is made once for all runs that differ in weights, seed and
continuous settings only. On CUDA every place is a stream of its own, so that places fill what one step leaves
of the card. Elsewhere runs follow one another.

A run's masks come from a generator of its own, so that its result does not depend on its neighbours.
"""

from __future__ import annotations

import copy
import gc
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from stfseb.errors import DivergedError, StfsebError
from stfseb.inputs import place_of
from stfseb.methods.memory import NoMemoryError
from stfseb.methods.settings import check_count
from stfseb.networks.layout import layout_kept
from stfseb.networks.memory import memory_kept
from stfseb.training.batches import Augment, ResidentBatches, as_pair, fits
from stfseb.training.engine import CapturedEngine, worth_compiling
from stfseb.training.fit import conclude
from stfseb.training.interrupts import Interrupted, Interrupts
from stfseb.training.loop import FitResult, Protocol, Training, check_split

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from stfseb.methods.base import Method

_VALIDATION_ROWS = 1024
_RUNS = 3  # that a place is expected to see, of which nobody knows how many are to come


@dataclass(frozen=True)
class Member:
    """One run of a population: how to make its method, its seed, and the file in which it is kept, as in `fit`."""

    name: str
    make: Callable[[], Method]
    seed: int = 0
    checkpoint: Path | None = None

    def __post_init__(self) -> None:
        if isinstance(self.make, torch.nn.Module) or not callable(self.make):
            given = type(self.make).__name__
            raise StfsebError(f"make of member '{self.name}' is of type {given}: give a function that returns a method")


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
    checkpoint_every: float | None = None,
    **protocol: Any,
) -> Iterator[Outcome]:
    """Train all members, `width` at a time, and yield each as it finishes.

    SIGTERM and Ctrl-C while members train save those that have a checkpoint and raise `Interrupted`.

    Args:
        members: the runs, taken as places become free.
        train: (x, y) or an image set; kept on the device once for all runs.
        validation: the same, for early stopping.
        width: places on the card.
        batch_size: minibatch size.
        device: where to train.
        augment: applied to each training minibatch.
        prune: asked after each epoch with the run's history; True ends the run where it is.
        checkpoint_every: seconds between a member's checkpoints, as in `fit`.
        protocol: as in `fit` (epochs, patience, lr, precision, ...).
    """
    check_count(width=width, batch_size=batch_size)
    place = place_of(device)
    pair, held = as_pair(train, "train"), as_pair(validation, "validation")
    if pair is None or held is None:
        raise StfsebError("a population needs train and validation as (x, y) or image sets, which stay on the device")
    if not fits((*pair, *held), place):
        raise StfsebError(
            f"train and validation do not fit into the memory of {place}, where a population keeps them: train "
            "the runs one by one with fit, which sends minibatches there"
        )
    x, y = (part.to(place) for part in pair)
    held_out = ResidentBatches(*held, _VALIDATION_ROWS, 0, place)
    base = Protocol(**protocol)
    if base.compiled is None:  # a place's step is compiled once for all runs that come to it
        base = replace(base, compiled=worth_compiling(_RUNS * base.epochs * (len(x) // batch_size)))
    waiting = iter(members)
    running: list[_Place] = []
    never: list[Outcome] = []
    free: list[CapturedEngine] = []
    on_cuda = place.type == "cuda"
    # The allocator keeps what a stream has freed for that stream: places take turns with the same few.
    streams: list[torch.cuda.Stream | None] = [torch.cuda.Stream(place) for _ in range(width)] if on_cuda else [None]
    interrupts = Interrupts()
    with torch.random.fork_rng(devices=[place] if on_cuda else []):
        while True:
            # Entered anew for every round: between rounds the caller's own handlers rule.
            with interrupts:
                for member in islice(waiting, len(streams)):
                    batches = ResidentBatches(x, y, batch_size, member.seed, place, augment)
                    protocol_ = replace(base, seed=member.seed)
                    stream = streams.pop()
                    try:
                        now = _Place(
                            member, batches, held_out, protocol_, place, checkpoint_every, interrupts, free, stream
                        )
                    except DivergedError as error:  # a fit before training: the others go on
                        never.append(Outcome(member, None, None, str(error)))
                        streams.append(stream)
                    else:
                        running.append(now)
                        del now
                if not running and not never and interrupts.caught is None:
                    return
                ended = [current for current in running if current.step(prune)]
                if interrupts.caught is not None:
                    raise _stopped(running, interrupts.caught)
            while never:
                yield never.pop(0)
            while ended:  # no name is left that would keep a run's memory while the next one is made
                yield _left(ended.pop(0), running, streams, free)


def _left(
    ended: _Place, running: list[_Place], streams: list[torch.cuda.Stream | None], free: list[CapturedEngine]
) -> Outcome:
    """Return how a run ended; its stream and its captured step are free again."""
    running.remove(ended)
    outcome = ended.outcome()
    streams.append(ended.stream)
    if isinstance(ended.training.engine, CapturedEngine):
        free.append(ended.training.engine)
    return outcome


def _stopped(running: list[_Place], signum: int) -> Interrupted:
    """Save every run and return the error that says so."""
    errors = [error for current in running if (error := current.stopped_by(signum)) is not None]
    if len(errors) == 1:
        return errors[0]
    kept = sum(current.member.checkpoint is not None for current in running)
    remedy = f"{kept} of them saved; start it again with the same checkpoints to go on"
    return Interrupted(signum, f"with {len(running)} runs under way", remedy)


class _Place:
    """A place on the card: a stream, and the run that has it."""

    def __init__(
        self,
        member: Member,
        batches: ResidentBatches,
        held_out: ResidentBatches,
        protocol: Protocol,
        place: torch.device,
        checkpoint_every: float | None,
        interrupts: Interrupts,
        free: list[CapturedEngine],
        stream: torch.cuda.Stream | None,
    ) -> None:
        self.member = member
        self.stream = stream
        self.error = ""
        self.interrupted: Interrupted | None = None
        self.method = member.make().to(place)
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(place))
        with self._here():
            check_split(self.method, batches, "train")
            check_split(self.method, held_out, "validation")
            engine = self._taken(free, batches) if self.stream is not None else None
            self.layout = ExitStack()
            if self.stream is None:  # its weights are to lie in the end as they did
                self.layout.enter_context(layout_kept(self.method.net))
            # On the card a copy is trained, which the next run of the same kind takes over, captured as it is.
            trained = self.method if self.stream is None else copy.deepcopy(self.method)
            self.training = Training(
                trained if engine is None else engine.method,
                batches,
                held_out,
                protocol,
                checkpoint=member.checkpoint,
                checkpoint_every=checkpoint_every,
                engine=engine,
                known_as=self.method,
            )
            self.training.interrupts = interrupts
            self._begin()

    def _taken(self, free: list[CapturedEngine], batches: ResidentBatches) -> CapturedEngine | None:
        """Return a free engine whose captured step is also this run's, with this run in it; drop one that is not."""
        for engine in free:
            if engine.serves(self.method):
                free.remove(engine)
                engine.take_over(self.method, batches)
                return engine
        if free:
            free.pop(0)  # its memory goes to the one that is captured now,
            gc.collect()  # also that of objects which refer to each other
        return None

    def step(self, prune: Callable[[Member, list[dict[str, Any]]], bool] | None) -> bool:
        """Finish the epoch under way and begin the next; return True when the run has ended."""
        training = self.training
        with self._here():
            if training.under_way and not self.error and self.interrupted is None:
                self._finish(prune)
            if self.error or training.done:
                return True
            if training.interrupts.caught is None:
                self._begin()
        return False

    def _finish(self, prune: Callable[[Member, list[dict[str, Any]]], bool] | None) -> None:
        training = self.training
        try:
            training.finish(training.completed + 1)
        except (DivergedError, NoMemoryError) as error:
            self.error = str(error)
            return
        if prune is not None and not training.done and prune(self.member, training.result.history):
            training.result.stopped = "pruned"
        if training.keeper is not None:
            training.keeper.after_epoch(training)

    def stopped_by(self, signum: int) -> Interrupted | None:
        """Save the run where it is, at the end of the epoch under way or in the middle of it; None: it had failed."""
        with self._here():
            if self.interrupted is None and self.training.under_way and not self.error:
                self._finish(None)
            if self.error:
                return None
            return self.interrupted or self.training.stopped_by(signum)

    def outcome(self) -> Outcome:
        """Return the run at its best epoch."""
        if self.error:
            return Outcome(self.member, None, None, self.error)
        with self._here():
            result = conclude(self.training, self.training.restore_best())
            if self.training.method is not self.method:
                self.method.load_state_dict(self.training.method.state_dict())
                self.method.calibration = self.training.method.calibration
                self.method.provenance = self.training.method.provenance
                self.method.eval()
            self.layout.close()
        if self.stream is not None:
            self.stream.synchronize()
        return Outcome(self.member, self.method, result)

    def _begin(self) -> None:
        if self.training.done:  # its checkpoint was complete
            return
        try:
            self.training.begin(self.training.completed + 1)
        except (DivergedError, NoMemoryError) as error:  # off the GPU every step is checked
            self.error = str(error)
        except Interrupted as stop:  # saved in the middle of an epoch; the others are to be saved too
            self.interrupted = stop

    def _here(self) -> Any:
        return memory_kept() if self.stream is None else torch.cuda.stream(self.stream)
