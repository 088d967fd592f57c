"""A run of training, an epoch at a time: what `fit` and populations share.

An epoch is begun and finished separately, so that several runs can have theirs on the device at once.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from stfseb.errors import DivergedError, StfsebError
from stfseb.inputs import check_fits, check_pixels, check_seed
from stfseb.methods.base import Method, Terms
from stfseb.methods.context import generator
from stfseb.methods.function_term import prior_failure
from stfseb.methods.memory import NoMemoryError, is_out_of_memory
from stfseb.methods.settings import check_count, check_positive, is_weight
from stfseb.networks.precision import resolve, running
from stfseb.training import randomness
from stfseb.training.batches import Batches, LoaderBatches, ResidentBatches
from stfseb.training.engine import CapturedEngine, EagerEngine, Engine, make_engine, make_optimiser
from stfseb.training.interrupts import Interrupted, Interrupts
from stfseb.training.progress import in_epochs
from stfseb.training.resuming import Keeper, Partial, identity_of
from stfseb.training.suspicions import warn_of_mistakes
from stfseb.training.validation import Score, validation_score

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

log = logging.getLogger("stfseb")

_WEAKER = "lower the learning rate, or weaken the prior (larger sigma, tau2)"
_PREPARE = 8192  # examples a streamed data set hands to `prepare`


@dataclass
class FitResult:
    """What a run did: one entry an epoch (terms in nats per example that it has seen), and how it ended."""

    history: list[dict[str, Any]] = field(default_factory=list)
    best_epoch: int = 0
    best_validation_nll: float = math.inf
    stopped: str = ""  # "patience" or "epochs"
    engine: str = ""  # how the steps were run, in words
    collapsed: bool = False
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"{in_epochs(len(self.history))} in {self.seconds:.0f} s (stopped by {self.stopped}), best epoch "
            f"{self.best_epoch} with validation NLL {self.best_validation_nll:.4f}"
        )


@dataclass(frozen=True)
class Protocol:
    """How a run is trained; the defaults are the paper's."""

    epochs: int = 100
    patience: int = 10
    lr: float = 5e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    validation_samples: int | None = None
    seed: int = 0
    precision: str = "auto"
    capture: bool | None = None
    compiled: bool | None = None

    def __post_init__(self) -> None:
        check_count(epochs=self.epochs, patience=self.patience)
        check_positive(lr=self.lr)
        check_seed(self.seed)
        if self.validation_samples is not None:
            check_count(validation_samples=self.validation_samples)
        if not is_weight(self.eps):
            raise StfsebError(f"eps={self.eps}: must be a number of at least 0")
        betas = list(self.betas) if isinstance(self.betas, Iterable) else []
        if not (len(betas) == 2 and all(map(_is_decay, betas))):
            raise StfsebError(f"betas={self.betas}: give two numbers of at least 0 and below 1")


def _is_decay(beta: Any) -> bool:
    return is_weight(beta) and float(beta) < 1


class Training:
    """One method in training: `begin(n)`, `finish(n)`, `keep()` for n = completed + 1, ... until `done`.

    Then `restore_best()`. With a checkpoint that exists, the run goes on from there. torch's default generators are
    seeded at each epoch: callers fork them.
    """

    def __init__(
        self,
        method: Method,
        batches: Batches,
        held_out: Batches,
        protocol: Protocol,
        *,
        checkpoint: Path | None = None,
        checkpoint_every: float | None = None,
        engine: CapturedEngine | None = None,
        known_as: Method | None = None,
    ) -> None:
        self.method, self.batches, self.held_out, self.protocol = method, batches, held_out, protocol
        self.result = FitResult()
        self.partial: Partial | None = None
        self.under_way = False
        self.sources: dict[str, Tensor] = {}
        self.interrupts = Interrupts()  # callers enter it around the epochs, or give one of their own
        self.keeper: Keeper | None = None
        if checkpoint is not None:
            # The method of a captured step stands in for the run's own, but for its feature extractor.
            identity = identity_of(known_as or method, batches, held_out, protocol)
            self.keeper = Keeper(checkpoint, checkpoint_every, identity)
        self.started = time.perf_counter()
        seed = protocol.seed
        torch.manual_seed(generator(seed, 4, 0).initial_seed())
        method.reseed(seed)
        method.prepare(*batches.examples(batches.num_data if isinstance(batches, ResidentBatches) else _PREPARE))
        method.train()
        if engine is not None:  # of an earlier run, which has taken this one's weights and settings over
            self.optimiser: torch.optim.Optimizer = engine.optimiser
            self.engine: Engine = engine
        else:
            self.optimiser = make_optimiser(method, lr=protocol.lr, betas=protocol.betas, eps=protocol.eps)
            self.engine = make_engine(
                method,
                batches,
                self.optimiser,
                precision=protocol.precision,
                capture=protocol.capture,
                compiled=protocol.compiled,
                epochs=protocol.epochs,
            )
        self.result.engine = self.engine.description
        self.precision = resolve(protocol.precision, method.net)
        self.best = copy.deepcopy(method.state_dict())
        if self.keeper is not None:
            self.keeper.restore(self)

    @property
    def completed(self) -> int:
        """Return how many epochs are complete."""
        return len(self.result.history)

    @property
    def steps(self) -> int:
        """Return how many steps an epoch has."""
        if isinstance(self.batches, LoaderBatches):
            return self.batches.steps
        return -(-self.batches.num_data // self.batches.batch_size)

    @property
    def samples(self) -> int:
        """Return the Monte Carlo samples of the validation score."""
        asked = self.protocol.validation_samples
        return self.method.samples if asked is None else asked

    def begin(self, number: int, on_step: Callable[[int], None] = lambda _: None) -> None:
        """Run epoch `number`; on a device its steps may still be under way when this returns."""
        device, partial = self.method.like.device, self.partial
        if partial is not None:
            randomness.put_back(partial.start, device, self.batches)
        elif self.keeper is not None and isinstance(self.engine, EagerEngine):
            self.sources = randomness.states(device, self.batches)
        seed = generator(self.protocol.seed, 4, number).initial_seed()
        torch.manual_seed(seed)
        self.engine.reseed(seed)
        self.begun = time.perf_counter()
        if partial is not None and isinstance(self.engine, EagerEngine):
            self.begun -= partial.seconds
            self.sources, self.partial = partial.start, None
            self.engine.take_up(
                partial.steps, partial.sums, lambda: randomness.put_back(partial.now, device, self.batches)
            )
        self.method.train()
        self.under_way = True

        def stepped(count: int) -> None:
            on_step(count)
            self._after_step()

        self.sums = self.engine.epoch(number, stepped, lambda terms: self.check(terms, number))

    def finish(self, number: int) -> dict[str, Any]:
        """Wait for the epoch, validate, keep the best weights; return the epoch's entry."""
        figures = (self.sums / max(1, self.engine.seen)).tolist()
        if not all(map(math.isfinite, figures)):
            self.check(Terms(*self.sums), number)
        entry: dict[str, Any] = {"epoch": number, **dict(zip(Terms._fields, figures, strict=True))}
        entry["seconds"] = time.perf_counter() - self.begun
        score = self.validate()
        entry |= {"validation_nll": score.nll, "validation_accuracy": score.accuracy}
        if learnt := self.method.learnt():
            entry["learnt"] = learnt
        result = self.result
        result.history.append(entry)
        self.under_way = False
        if score.nll < result.best_validation_nll:
            result.best_epoch, result.best_validation_nll = number, score.nll
            self.best = copy.deepcopy(self.method.state_dict())
        if number - result.best_epoch >= self.protocol.patience:
            result.stopped = "patience"
        elif number >= self.protocol.epochs:
            result.stopped = "epochs"
        return entry

    # Checkpoints and interrupts ----------------------------------------------------------------------

    def keep(self) -> None:
        """After an epoch: write the checkpoint if it is time, and stop if somebody has asked for it."""
        if self.interrupts.caught is not None:
            raise self.stopped_by(self.interrupts.caught)
        if self.keeper is not None:
            self.keeper.after_epoch(self)

    def _after_step(self) -> None:
        if not isinstance(self.engine, EagerEngine):
            return  # captured epochs are short: they are finished first
        if self.interrupts.caught is not None:
            raise self.stopped_by(self.interrupts.caught)
        if self.keeper is not None and self.keeper.due:
            self.keeper.offer(self)

    def stopped_by(self, signum: int) -> Interrupted:
        """Save the run as it is now and return the error that says so."""
        where = f"after epoch {self.completed} of {self.protocol.epochs}"
        if self.under_way and isinstance(self.engine, EagerEngine):
            where = f"in epoch {self.completed + 1} of {self.protocol.epochs}, step {self.engine.made} of {self.steps}"
        if self.keeper is None:
            return Interrupted(
                signum, where, "nothing was saved; give checkpoint='FILE' to be able to go on the next time"
            )
        try:
            failed = "" if self.keeper.save(self) else "the weights are not finite"
        except StfsebError as error:
            failed = str(error)
        if failed:
            left = self.keeper.stays() or "; nothing was saved"
            return Interrupted(signum, where, f"the checkpoint could not be written ({failed}){left}")
        return Interrupted(
            signum, where, f"saved in {self.keeper.path}; start it again with the same checkpoint to go on"
        )

    @property
    def done(self) -> bool:
        """Tell whether the run has stopped."""
        return bool(self.result.stopped)

    def validate(self) -> Score:
        """Return the validation score in the precision of the training."""
        try:
            with running(self.precision, self.method.like.device):
                return validation_score(self.method, validation_batches(self.held_out), self.samples)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise NoMemoryError(
                f"validation with {self.samples} sample{'s' * (self.samples > 1)} does not fit into memory: lower "
                "validation_samples"
            ) from error

    def restore_best(self) -> FitResult:
        """Leave the method at its best epoch, in evaluation mode, and return the result."""
        self.method.load_state_dict(self.best)
        self.method.eval()
        self.result.seconds = time.perf_counter() - self.started
        return self.result

    def check(self, terms: Terms, epoch: int) -> None:
        """Raise an error that names the term and the settings if a term is not finite."""
        for name, value in zip(Terms._fields, (float(term.detach()) for term in terms), strict=True):
            if not math.isfinite(value):
                settings = ", ".join(f"{k}={v}" for k, v in self.method.settings.as_dict().items())
                raise DivergedError(
                    f"the {name} term became {value} in epoch {epoch} of {self.method.label} ({settings}): "
                    + (prior_failure(self.method) or _WEAKER)
                    + ("" if self.keeper is None else self.keeper.stays())
                )


def check_split(method: Method, batches: Batches, what: str) -> None:
    """Raise a one-line error unless these examples fit the method's network and likelihood."""
    x, y = batches.examples(batches.batch_size if isinstance(batches, LoaderBatches) else batches.num_data)
    if what == "train":
        method.seen.learn(check_pixels(x, "train x"))
        if method.context is not None and method.context.images is not None:
            method.seen.check(method.context.images, "context")
    else:
        method.seen.check(x, f"{what} x")
    method._outputs = None  # found anew: what the network makes of one split says nothing of another's shape
    outputs = check_fits(method.outputs, x, f"{what} x")
    method.likelihood.check_targets(y, outputs)
    if isinstance(batches, LoaderBatches):  # the minibatches to come, too
        batches.check = lambda y: method.likelihood.check_targets(y, outputs)
    if what == "train":
        warn_of_mistakes(method, x, y, batches.num_data)


def validation_batches(batches: Batches) -> Iterable[tuple[Tensor, Tensor]]:
    """Return the examples in their own order."""
    if isinstance(batches, ResidentBatches):
        return zip(batches.x.split(batches.batch_size), batches.y.split(batches.batch_size), strict=True)
    return batches.epoch(0)
