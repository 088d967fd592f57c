"""The contract of a likelihood.

A likelihood turns outputs (S, B, L) of S sampled functions and targets (B, ...) into log densities (S, B), and
outputs into the prediction that the Monte Carlo average makes. Its own parameters (a learnt noise level) are
torch parameters, so that a method's optimiser finds them and saved models keep them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from stfseb.errors import StfsebError

if TYPE_CHECKING:
    from collections.abc import Callable


class Likelihood(nn.Module, ABC):
    """p(y | f(x)), factorised over rows."""

    name: ClassVar[str]

    @abstractmethod
    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return log p(y_i | f_s(x_i)) as (S, B) from outputs (S, B, L)."""

    @abstractmethod
    def predict(self, outputs: Tensor) -> Tensor:
        """Return the Monte Carlo average of the prediction, (B, ...), from outputs (S, B, L)."""

    @abstractmethod
    def check_targets(self, y: Tensor, outputs: int) -> None:
        """Raise a one-line error unless `y` can be a target of a network with that many outputs."""

    def check_kind(self, y: Tensor) -> None:
        """Raise a one-line error where dtype or shape alone tell that `y` is no target: a step can afford no more.

        Values are not read, so that a card need not wait for them.
        """
        del y

    def check_shapes(self, y: Tensor, outputs: int) -> None:
        """Raise a one-line error where shapes alone tell that a network with that many outputs is another one's.

        Asked of every step, where `check_targets` may not have been: in loops of one's own.
        """
        del y, outputs

    def uncertainty(self, outputs: Tensor) -> Tensor:
        """Return one number a row, (B,), in float64, that grows as the prediction becomes less certain.

        Unless a likelihood knows better: the variance of the outputs over samples, averaged over outputs.
        """
        return outputs.double().var(0, correction=0).mean(-1)

    def pooled(self, outputs: Tensor) -> Tensor:
        """Return the outputs (1, B, L) of one function that predicts what these (S, B, L) predict on average.

        A likelihood without probabilities has none: the average of regressions is a mixture and no regression.
        """
        del outputs
        raise StfsebError(f"the {self.name} likelihood has no probabilities to pool")

    def settings(self) -> dict[str, Any]:
        """Return the constructor's arguments, as JSON knows them."""
        return {}

    def spec(self) -> dict[str, Any]:
        """Return what rebuilds this likelihood, less its parameters: for saved models."""
        return {"name": self.name, **self.settings()}

    def log_predictive(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return log (1/S) sum_s p(y_i | f_s(x_i)), the log density of the Monte Carlo mixture, (B,), in float64."""
        return self.log_prob(outputs, y).double().logsumexp(0) - math.log(len(outputs))


def where_readable(check: Callable[[Tensor], None], y: Tensor) -> None:
    """Check the values of targets that lie on the CPU.

    A card would have to be waited for, a compiled step has no values to read, nor have those under `vmap`.
    """
    if y.device.type == "cpu" and not torch.compiler.is_compiling():
        with suppress(RuntimeError):
            check(y)


def wide(outputs: Tensor) -> Tensor:
    """Return outputs in float32 at least: under mixed precision they come as bfloat16."""
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))
