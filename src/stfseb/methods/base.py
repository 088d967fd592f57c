"""The contract that every method keeps.

A method holds a network by reference and adds an objective to it. `objective` returns the terms of one
minibatch in nats, *summed* over the minibatch; a training loop divides `terms.total` by the batch size
and calls `backward`. `sample_logits` draws functions from the approximate posterior.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from stfseb.errors import StfsebError
from stfseb.inputs import REFUSALS, as_minibatch, as_tensor, check_fits, check_seed, check_sizes, one_row_named, scaled
from stfseb.likelihoods import Likelihood, Regression, chosen
from stfseb.methods.calibrated import mapped, tempered
from stfseb.methods.decisions import DecidingMixin
from stfseb.methods.memory import ROWS, fewer, free_unused, is_out_of_memory, sized
from stfseb.methods.settings import check_count
from stfseb.networks.capturing import built_into
from stfseb.networks.checks import check_network
from stfseb.networks.folding import deterministic
from stfseb.networks.memory import memory_kept
from stfseb.ranges import SeenRange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from stfseb.methods.context import Context, Draw
    from stfseb.methods.settings import Settings

Result = TypeVar("Result")


class Terms(NamedTuple):
    """One minibatch's objective, in nats summed over the minibatch; absent terms are zero."""

    data: Tensor
    function: Tensor
    weights: Tensor

    @property
    def total(self) -> Tensor:
        """Return the sum that is minimised."""
        return self.data + self.function + self.weights


class Method(DecidingMixin, nn.Module, ABC):
    """A network and the objective that trains it."""

    key: ClassVar[str]  # as on the command line
    label: ClassVar[str]  # as in tables
    settings_type: ClassVar[type[Settings]]
    live_names: ClassVar[tuple[str, ...]] = ()  # the continuous settings, which may become tensors on the device
    live_settings: ClassVar[tuple[str, ...]] = ()  # the arguments that they come from, where the names differ
    lazy: ClassVar[bool] = True  # whether the first pass may make the network's weights
    rows: ClassVar[dict[str, int]] = {}  # of one pass of a convolutional network, where `ROWS` does not suit
    _bearable: int | None = None  # input numbers times samples in one pass, since more did not fit into memory
    # DistributedDataParallel would send all context images from one process to the others at every step.
    _ddp_params_and_buffers_to_ignore: ClassVar[tuple[str, ...]] = ("context.images", "context.cached")
    net: nn.Module

    def __init__(self, net: nn.Module, settings: Any, likelihood: Likelihood | None = None) -> None:
        super().__init__()
        check_network(net, self.label, lazy=self.lazy)
        self.net = net
        self.settings = settings
        self.likelihood = chosen(likelihood).to(self.like.device, self.like.dtype)
        self.calibration: dict[str, Any] = {}  # what was fitted on held-out data; saved with the model
        self.provenance: dict[str, Any] = {}  # what the model was trained on; saved with the model
        self.seen = SeenRange()  # the range of the training inputs; saved with the model
        self.context: Context | None = None
        self.live: dict[str, Tensor] = {}
        self._outputs: int | None = None

    # What a method defines ---------------------------------------------------------------------------

    @abstractmethod
    def terms(self, x: Tensor, y: Tensor, draw: Draw | None, share: float, part: float) -> Terms:
        """Return the terms of a minibatch whose context has been drawn.

        Args:
            x: the minibatch, already scaled and in the network's precision.
            y: its targets.
            draw: the context points of the step, None where the method uses none.
            share: len(x) / num_data, what the weights term carries.
            part: len(x) / batch_size where x is a part of a step, else 1; what the function term carries.
        """

    @abstractmethod
    def _draw(self, x: Tensor, samples: int, seed: int) -> Tensor:
        """Return logits (samples, rows, outputs) of functions that depend on `seed` alone, not on x."""

    def prepare(self, x: Tensor, y: Tensor) -> None:
        """Fit what must be known before training; nothing for most methods."""

    @classmethod
    def restore(cls, net: nn.Module, settings: Any, likelihood: Likelihood) -> Method:
        """Return the method around `net` with these settings, as `load` needs it."""
        return cls(net, **asdict(settings), likelihood=likelihood)

    def hyper(self, name: str) -> Any:
        """Return a continuous setting: the number, or the tensor that stands for it on the device."""
        return self.live[name] if name in self.live else getattr(self.settings, name)

    def make_live(self, like: Tensor) -> None:
        """Turn the continuous settings into tensors, so that one captured step serves any values of them."""
        for name in self.live_names:
            value = float(getattr(self.settings, name))
            if math.isfinite(value):  # the infinite is a formula of its own
                self.live[name] = torch.tensor(value, dtype=torch.float64, device=like.device)

    def captured_key(self) -> tuple[Any, ...]:
        """Return all that a captured step is made for: not the weights, nor the values of live settings."""
        moving = set(self.live_settings or self.live_names)
        fixed = {name: value for name, value in self.settings.as_dict().items() if name not in moving}
        finite = tuple(name for name in self.live_names if math.isfinite(getattr(self.settings, name)))
        tensors = [*self.state_dict().items(), *self.net.named_buffers()]
        shapes = tuple((name, tuple(value.shape), value.dtype) for name, value in tensors)
        trained = tuple(name for name, parameter in self.named_parameters() if parameter.requires_grad)
        built_in = built_into(self.net), repr(sorted(self.likelihood.spec().items()))
        return type(self), repr(sorted(fixed.items())), finite, shapes, trained, *built_in

    @torch.no_grad()
    def take_over(self, other: Method) -> None:
        """Become `other`, a method with the same `captured_key`, in place: every tensor keeps its address."""
        self.settings = other.settings
        self.calibration, self.provenance, self.seen = dict(other.calibration), dict(other.provenance), other.seen
        for name, value in self.live.items():
            value.fill_(float(getattr(other.settings, name)))
        theirs = other.state_dict()
        for name, value in self.state_dict().items():
            value.copy_(theirs[name])
        for value, their in zip(self.net.buffers(), other.net.buffers(), strict=True):  # those that are not saved, too
            value.copy_(their)
        if self.context is not None and other.context is not None:
            self.context.take_over(other.context, self.like)

    def learnt(self) -> dict[str, float]:
        """Return the settings that were learnt with the weights, by name; most methods learn none."""
        return {}

    def complaints(self) -> list[str]:
        """Return what a user should be warned of after training."""
        return []

    @property
    def spectral(self) -> bool:
        """Tell whether the function term wants eigen-decompositions of context Gram matrices rather than factors."""
        return False

    # What all methods share --------------------------------------------------------------------------

    def objective(self, x: Tensor, y: Tensor, num_data: int, batch_size: int | None = None) -> Terms:
        """Return the terms of the minibatch (x, y) of a data set of `num_data` examples.

        `batch_size` is the size of the whole step when (x, y) is a part of it (accumulation, several processes): the
        function term then carries len(x) / batch_size; parts share context points and masks until their rows add up
        to it or an optimiser steps.
        """
        x, y = as_minibatch(x, y, self.like)
        check_sizes(len(x), len(y), num_data, batch_size)
        self.likelihood.check_kind(y)
        draw = None
        if self.uses_context:
            if self.context is None:
                raise StfsebError(
                    "this method has no context images (a loaded model keeps only their fingerprint): "
                    "construct it anew with context=... to train it"
                )
            draw = self.context.next(x, batch_size, [] if batch_size is None else self.trainable())
        part = 1.0 if batch_size is None else len(x) / batch_size
        if len(x) > 1:
            return self.terms(x, y, draw, len(x) / num_data, part)
        with one_row_named():
            return self.terms(x, y, draw, len(x) / num_data, part)

    @property
    def uses_context(self) -> bool:
        """Tell whether a step needs context points."""
        return False

    @property
    def vectorised(self) -> bool:
        """Tell whether passes run under vmap, where memory layouts cannot be chosen."""
        return False

    def prior_ratio(self) -> tuple[Any, Any] | None:
        """Return tau1/tau2 and the bias variance, by which an engine may factor context Gram matrices beforehand."""
        return None

    def context_factors(self, images: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return what an engine may compute beforehand for sets of context points (k, N_c, ...): factors, inverses."""
        del images
        return None

    def reseed(self, seed: int) -> None:
        """Restart the method's own random streams (torch's default generator is the caller's)."""
        if self.context is not None:
            self.context.reseed(seed)

    @property
    def samples(self) -> int:
        """Return how many Monte Carlo samples prediction takes by default."""
        return int(getattr(self.settings, "samples", 1))

    @property
    def like(self) -> Tensor:
        """Return a tensor with the device and precision of the network."""
        return next(p for p in self.net.parameters() if p.is_floating_point())

    def outputs(self, x: Tensor) -> int:
        """Return the number of outputs (classes), found by one pass over the first row of `x`."""
        if self._outputs is None:
            with torch.no_grad(), evaluating(self.net):
                self._outputs = deterministic(self.net, scaled(x[:1], self.like)).shape[1]
        return self._outputs

    def sample_logits(
        self, x: Any, samples: int | None = None, *, seed: int | None = None, batch_size: int | None = None
    ) -> Tensor:
        """Return logits (S, B, L) of S functions drawn from the approximate posterior.

        Each sample is one function for all rows: the masks (or weights) are shared over rows and depend
        on `seed` alone, so that the result does not depend on how rows are grouped.
        """
        samples = self.samples if samples is None else samples
        check_count(samples=samples)
        x = as_tensor(x, "x")
        self.seen.check(x, "x")
        seed = int(torch.randint(2**62, ())) if seed is None else seed
        check_seed(seed)
        while True:
            rows = self._rows(x, samples, batch_size)
            try:
                with torch.no_grad(), evaluating(self.net), self._memory_kept(x, rows):
                    parts = [self._draw(scaled(part, self.like), samples, seed) for part in x.split(rows)]
                break
            except Exception as error:
                if is_out_of_memory(error):
                    self._bearable = samples * x[:1].numel() * fewer(min(rows, len(x)), samples, error)
                elif isinstance(error, REFUSALS):  # where one row fails as well, it is its shape
                    with torch.no_grad(), evaluating(self.net):
                        check_fits(lambda row: self._draw(scaled(row, self.like), samples, seed), x, "x")
                    raise
                else:
                    raise
            free_unused()  # outside of the handler, where the error no longer holds the failed attempt's tensors
        return torch.cat(parts, dim=1)

    def predict_proba(
        self, x: Any, samples: int | None = None, *, seed: int | None = None, batch_size: int | None = None
    ) -> Tensor:
        """Return the Monte Carlo average of the predictive probabilities, (N, L).

        Calibrated where `stfseb.calibrate` has been; `sample_logits` always gives the network's own outputs.
        """
        if isinstance(self.likelihood, Regression):
            raise StfsebError(
                f"the {self.likelihood.name} likelihood has no probabilities: use predict, predict_std or "
                "predict_interval"
            )
        return self.predict(x, samples, seed=seed, batch_size=batch_size)

    def predict(
        self, x: Any, samples: int | None = None, *, seed: int | None = None, batch_size: int | None = None
    ) -> Tensor:
        """Return what the likelihood predicts: probabilities (N, L), or means (N, D) in regression."""
        return torch.cat(self._over_rows(self._prediction, x, samples, seed, batch_size))

    def predict_std(
        self, x: Any, samples: int | None = None, *, seed: int | None = None, batch_size: int | None = None
    ) -> Tensor:
        """Return the standard deviation of the predicted targets, (N, D), noise included: regression only."""
        return torch.cat(self._over_rows(self._regression().std, x, samples, seed, batch_size))

    def predict_interval(
        self,
        x: Any,
        level: float = 0.95,
        samples: int | None = None,
        *,
        seed: int | None = None,
        batch_size: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the ends, (N, D) each, of the interval that holds a target with probability `level`."""
        likelihood = self._regression()
        ends = self._over_rows(lambda outputs: likelihood.interval(outputs, level), x, samples, seed, batch_size)
        return torch.cat([low for low, _ in ends]), torch.cat([high for _, high in ends])

    def forward(self, x: Tensor, y: Tensor, num_data: int, batch_size: int | None = None) -> Tensor:
        """Return `objective(...).total`: what wrappers that train by calling a module (DDP, Accelerate) call."""
        return self.objective(x, y, num_data, batch_size).total

    def _prediction(self, outputs: Tensor) -> Tensor:
        return mapped(self.calibration, self.likelihood.predict(outputs))

    def _regression(self) -> Regression:
        if not isinstance(self.likelihood, Regression):
            raise StfsebError(f"the {self.likelihood.name} likelihood has no intervals: use predict_proba")
        return self.likelihood

    def _over_rows(
        self,
        function: Callable[[Tensor], Result],
        x: Any,
        samples: int | None = None,
        seed: int | None = None,
        batch_size: int | None = None,
    ) -> list[Result]:
        """Apply `function` to the (tempered) outputs (S, rows, L) of chunks of `x`, all under the same masks."""
        x = as_tensor(x, "x")
        self.seen.check(x, "x")
        if seed is None:
            seed = int(torch.randint(2**62, ()))
        rows = self._rows(x, samples or self.samples, batch_size)

        def outputs(part: Tensor) -> Tensor:
            return self.sample_logits(part, samples, seed=seed, batch_size=batch_size)

        with torch.no_grad(), self._memory_kept(x, rows):
            return [function(tempered(self.calibration, self.likelihood, outputs(part))) for part in x.split(rows)]

    def _memory_kept(self, x: Tensor, rows: int) -> AbstractContextManager[None]:
        """Keep memory between the passes of a prediction, where it takes several and they run on the CPU."""
        return memory_kept(self.like.device.type == "cpu" and len(x) > rows)

    def _rows(self, x: Tensor, samples: int, batch_size: int | None = None) -> int:
        """Return how many rows of `x` one pass of prediction takes; of large images fewer."""
        check_count(samples=samples)
        if batch_size is not None:
            check_count(batch_size=batch_size)
            rows = min(int(batch_size), max(1, len(x)))
        else:
            own = self.rows if any(parameter.ndim == 4 for parameter in self.net.parameters()) else {}
            rows = max(1, sized({**ROWS, **own}.get(self.like.device.type, 16384), x) // samples)
        return (
            rows if self._bearable is None else max(1, min(rows, self._bearable // (samples * max(1, x[:1].numel()))))
        )

    def extra_repr(self) -> str:
        """Show the settings in `print(method)`."""
        return ", ".join(f"{k}={v}" for k, v in self.settings.as_dict().items())

    def trainable(self) -> list[Tensor]:
        """Return the network's parameters that the weight prior covers."""
        return [p for p in self.net.parameters() if p.requires_grad]


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """Put a network in evaluation mode and give every module its own mode back afterwards."""
    modes = [(module, module.training) for module in net.modules()]
    net.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
