"""One training step on fixed buffers: nothing in it asks the host for a value or changes a shape.

The data lie on the device in their own type; an epoch's order and context points are written into buffers
before it starts, its Gram matrices are factored in batched calls, and a counter on the device picks the
minibatch. So the same step can be run eagerly, compiled, or captured as one CUDA graph that the host only
replays.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stfseb.function_prior import FunctionPrior
from stfseb.inputs import scaled
from stfseb.methods.context import Draw
from stfseb.networks.dropout import random_words
from stfseb.networks.layout import CardLayout
from stfseb.networks.precision import running

if TYPE_CHECKING:
    from collections.abc import Callable

    from stfseb.methods.base import Method, Terms
    from stfseb.networks.dropout import Lanes
    from stfseb.training.batches import ResidentBatches

_FACTOR_BYTES = 256 * 2**20  # of Gram matrices factored at once


class StaticStep:
    """A method's training step over resident data: `steps` minibatches of `size` rows an epoch, in turn."""

    def __init__(
        self,
        method: Method,
        batches: ResidentBatches,
        optimiser: torch.optim.Optimizer,
        precision: str,
        *,
        steps: int,
        size: int,
        generator: torch.Generator | None = None,
    ) -> None:
        self.generator = generator
        self.method, self.batches, self.optimiser, self.precision = method, batches, optimiser, precision
        self.device = method.like.device
        self.steps = steps
        self.order = torch.zeros(self.steps, size, dtype=torch.int64, device=self.device)
        self.counter = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        self.share = size / batches.num_data
        self.forward: Callable[..., Terms] = self._terms  # an engine may put compiled ones here
        self.update: Callable[[], object] = optimiser.step
        self.plan: list[Lanes] = []
        self.context = method.context if method.uses_context else None
        if self.context is not None:
            assert self.context.images is not None
            self.images = self.context.images.to(self.device)
            self.points = torch.zeros(self.steps, self.context.num_context, dtype=torch.int64, device=self.device)
            self.features: Tensor | None = None
            self.factors: Tensor | None = None
            self.whiteners: Tensor | None = None
            self.spectra: Tensor | None = None
            if method.prior_ratio() is not None:
                self.features = self.context.features(method.like)

    # Before an epoch ---------------------------------------------------------------------------------

    def load(self, order: Tensor) -> None:
        """Write the rows, the context points and their factors of the coming steps."""
        self.order.copy_(order.view_as(self.order))
        self.counter.zero_()
        if self.context is not None:
            assert self.context.stream is not None
            self.points.copy_(self.context.stream.indices(self.context.step, self.steps).view_as(self.points))
            self.context.step += self.steps
            self._factor()

    def _factor(self) -> None:
        """Factor the epoch's Gram matrices in as few calls as memory allows."""
        ratio = self.method.prior_ratio()
        if self.features is None or ratio is None:
            self._factor_images()
            return
        count, width = self.points.shape[1], self.features.shape[1]
        chunk = max(1, _FACTOR_BYTES // (8 * count * max(count, width)))
        done = 0
        for points in self.points.split(chunk):
            spectrum = None
            if self.method.spectral:
                factor, spectrum = FunctionPrior.decompose(self.features[points], ratio[1])
            else:
                factor = FunctionPrior.factorise(self.features[points], *ratio)
            if self.factors is None:
                self.factors = torch.zeros(self.steps, *factor.shape[1:], dtype=factor.dtype, device=self.device)
                if spectrum is not None:
                    self.spectra = torch.zeros(self.steps, count, dtype=factor.dtype, device=self.device)
                else:
                    self.whiteners = torch.zeros_like(self.factors)
            self.factors[done : done + len(points)] = factor
            if self.spectra is not None and spectrum is not None:
                self.spectra[done : done + len(points)] = spectrum
            if self.whiteners is not None:
                self.whiteners[done : done + len(points)] = FunctionPrior.whiten(factor)
            done += len(points)

    def _factor_images(self) -> None:
        """Factor what a method makes of the context images themselves, if it does."""
        count, pixels = self.points.shape[1], self.images[0].numel()
        chunk = max(1, _FACTOR_BYTES // (8 * count * (pixels + count)))
        done = 0
        for points in self.points.split(chunk):
            images = scaled(self.images[points.flatten()], self.method.like).unflatten(0, points.shape)
            found = self.method.context_factors(images)
            if found is None:
                return
            if self.factors is None or self.whiteners is None:
                self.factors, self.whiteners = (
                    torch.zeros(self.steps, *part.shape[1:], dtype=part.dtype, device=self.device) for part in found
                )
            self.factors[done : done + len(points)], self.whiteners[done : done + len(points)] = found
            done += len(points)

    # The step ----------------------------------------------------------------------------------------

    def __call__(self) -> None:
        """Make one step with the minibatch that the counter points at, and move the counter on.

        A backward pass inside of autocast, and one compiled there, runs in bf16 even what the forward pass took out
        of it. So autocast is off here, and `_terms` switches it on for the forward pass alone.
        """
        with torch.autocast(self.device.type, enabled=False):
            x, y, draw = self._inputs()
            lanes = self._lanes()
            terms = self.forward(x, y, draw, lanes)
            loss = torch.stack([*terms]).sum() / self.batches.batch_size
            loss.backward()
        self.update()
        self.sums += torch.stack([term.detach() for term in terms]).double()
        self.counter += 1

    def _inputs(self) -> tuple[Tensor, Tensor, Draw | None]:
        rows = self._now(self.order)
        like = self.method.like
        x = self.batches.x.index_select(0, rows)
        x = scaled(self.batches.augmented(x, self.generator), like)
        y = self.batches.y.index_select(0, rows)
        if self.context is None:
            return x, y, None
        points = self._now(self.points)
        images = scaled(self.images.index_select(0, points), like)
        if self.factors is None:
            return x, y, Draw(images, images.new_zeros(0))
        if self.spectra is not None:
            return x, y, Draw(images, images.new_zeros(0), None, self._now(self.factors), None, self._now(self.spectra))
        assert self.whiteners is not None
        whitener = self._now(self.whiteners)
        factor = whitener if self.features is not None else self._now(self.factors)
        features = images.new_zeros(0)  # the whitener is all that the prior needs
        if self.features is not None and whitener.shape[-1] < len(images):  # but for the ridge form
            features = self.features.index_select(0, points)
        return x, y, Draw(images, features, None, factor, whitener)

    def _now(self, epoch: Tensor) -> Tensor:
        return epoch.index_select(0, self.counter)[0]

    def _lanes(self) -> list[Tensor]:
        """Draw the random bits of all masks in one call, outside of what may be compiled.

        Inductor may give neighbouring channels the same mask, and another in the backward pass (pytorch issue
        198333); bits that come in as inputs cannot differ between the two.
        """
        if not self.plan:
            return []
        words = random_words(sum(lanes.words for lanes in self.plan), self.device, self.generator)
        parts = words.split([lanes.words for lanes in self.plan])
        return [lanes.cut(part) for lanes, part in zip(self.plan, parts, strict=True)]

    def _terms(self, x: Tensor, y: Tensor, draw: Draw | None, lanes: list[Tensor]) -> Terms:
        folded = getattr(self.method, "folded", None)
        if folded is not None:
            folded.lanes = lanes or None
        bf16 = self.precision == "bf16"
        with (
            torch.autocast(self.device.type, torch.bfloat16, enabled=bf16, cache_enabled=False),
            CardLayout() if bf16 and not self.method.vectorised else nullcontext(),
        ):
            return self.method.terms(x, y, draw, self.share, 1.0)

    def terms_to_compile(self) -> Callable[..., Terms]:
        """Return `_terms` with code that steps of this kind alone have.

        Dynamo keeps what it has compiled with a function's code. Where none of it fits, it says why by evaluating the
        guards of all, and those of another method's step end in a KeyError (torch 2.11 and 2.13).
        """
        return MethodType(_terms_of(self.method.captured_key()), self)

    def learn_plan(self) -> None:
        """Find which masks a step needs, by one forward pass whose result is thrown away."""
        folded = getattr(self.method, "folded", None)
        with torch.no_grad(), running(self.precision, self.device):
            x, y, draw = self._inputs()
            self._terms(x, y, draw, [])
        self.plan = [] if folded is None else list(folded.plan)


@lru_cache(maxsize=64)
def _terms_of(kind: tuple[Any, ...]) -> FunctionType:
    """Return `_terms` anew for each kind: a compiler knows nothing about its code."""
    del kind
    plain: Any = StaticStep._terms
    return FunctionType(plain.__code__.replace(), plain.__globals__, plain.__name__)


def release(method: Method) -> None:
    """Let the method draw its own masks again."""
    folded = getattr(method, "folded", None)
    if folded is not None:
        folded.lanes = None
