"""MC Dropout: dropout masks as the variational family, a Gaussian weight prior.

    (1/S) sum_s sum_batch CE(theta_s) + (w/M) ||theta||^2 / (2 sigma^2),      M = num_data / batch

w is the dropout rate (`prior_weight="rate"`, as the ST-FS-EB paper writes it), the keep probability
(`"keep"`, as Gal and Ghahramani's KL approximation has it) or a number.

Gal and Ghahramani, Dropout as a Bayesian approximation, ICML 2016, https://arxiv.org/abs/1506.02142
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from stfseb.errors import StfsebError
from stfseb.methods.base import Method, Terms, evaluating
from stfseb.methods.settings import Settings, check_count, check_positive, is_weight
from stfseb.networks.batch_statistics import Together
from stfseb.networks.dropout import Block, check_has_dropout, module_rates
from stfseb.networks.folding import FoldedNetwork, has_batch_statistics
from stfseb.weight_prior import WeightPrior

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from torch import Tensor, nn

    from stfseb.likelihoods import Likelihood
    from stfseb.methods.context import Draw


@dataclass(frozen=True)
class MCDropoutSettings(Settings):
    """Settings of `MCDropout`."""

    sigma: float = 1.0
    samples: int = 10
    prior_weight: float | str = "rate"

    def __post_init__(self) -> None:
        check_positive(sigma=self.sigma)
        check_count(samples=self.samples)
        check_prior_weight(self.prior_weight)


class DropoutMethod(Method):
    """What the methods whose posterior is MC dropout share: masks, folding, the weight of the prior."""

    rows = {"cpu": 1024}  # these stay in the caches  # noqa: RUF012

    def __init__(self, net: nn.Module, settings: Settings, likelihood: Likelihood | None) -> None:
        super().__init__(net, settings, likelihood)
        check_has_dropout(net)
        rates = module_rates(net)
        if len(rates) > 1:
            prior_weight(self.settings.prior_weight, rates)
        self.folded = FoldedNetwork(net)
        self._together = Together()

    def run_with_context(
        self, x: Tensor, context: Tensor, samples: int, *, shared: bool, masks: torch.Generator | None
    ) -> tuple[Tensor, Tensor, set[float]]:
        """Return the logits of data rows and context rows, each (S, rows, L), and the dropout rates.

        Context rows draw their dropout from `masks`; `shared`: one mask a sample. Batch norm takes its statistics from
        data rows only (see `networks.batch_statistics`).
        """
        blocks, rows = [Block(len(x), shared=False), Block(len(context), shared, masks)], torch.cat([x, context])

        def joint() -> tuple[Tensor, set[float]]:
            return self.folded(rows, samples, blocks)

        averaged = has_batch_statistics(self.net)
        both = self._together(self.net, len(x), len(rows), samples, joint) if averaged else joint()
        if both is None:
            logits, rates = self.folded(x, samples, blocks[:1])
            with evaluating(self.net):  # context rows see the running averages
                outside, _ = self.folded(context, samples, blocks[1:])
            return logits, outside, rates
        logits, rates = both
        return logits[:, : len(x)], logits[:, len(x) :], rates

    def _draw(self, x: Tensor, samples: int, seed: int) -> Tensor:
        # Where masks have been drawn beforehand there is nothing left to draw (and a capture could not).
        drawn = self.folded.lanes is not None
        generator = None if drawn else torch.Generator(x.device).manual_seed(seed)
        logits, _ = self.folded(x, samples, [Block(len(x), shared=True, generator=generator)])
        return logits


class MCDropout(DropoutMethod):
    """Monte Carlo dropout with an isotropic Gaussian prior on every parameter."""

    key = "mcdropout"
    label = "MC Dropout"
    settings_type = MCDropoutSettings
    live_names = ("sigma",)

    def __init__(
        self,
        net: nn.Module,
        sigma: float = 1.0,
        samples: int = 10,
        *,
        prior_weight: float | str = "rate",
        likelihood: Likelihood | None = None,
    ) -> None:
        super().__init__(net, MCDropoutSettings(sigma, samples, prior_weight), likelihood)

    def terms(self, x: Tensor, y: Tensor, draw: Draw | None, share: float, part: float) -> Terms:
        """Return the Monte Carlo negative log-likelihood and the prior's share of this minibatch."""
        del draw, part  # no function term
        logits, rates = self.folded(x, self.settings.samples, [Block(len(x), shared=False)])
        data = -self.likelihood.log_prob(logits, y).mean(0).sum()
        weight = prior_weight(self.settings.prior_weight, rates) * share
        weights = WeightPrior(math.inf, self.hyper("sigma")).penalty(self.trainable()) * weight
        return Terms(data, data.new_zeros(()), weights)


def check_prior_weight(value: float | str) -> None:
    """Raise unless `value` is "rate", "keep" or a number of at least zero."""
    valid = value in ("rate", "keep") or is_weight(value)
    if not valid:
        raise StfsebError(f"prior_weight={value!r}: give 'rate', 'keep' or a number of at least 0")


def prior_weight(setting: float | str, rates: AbstractSet[float]) -> float:
    """Return the factor of the log prior for a network with these dropout rates."""
    if not isinstance(setting, str):
        return float(setting)
    if len(rates) != 1:
        listed = ", ".join(f"{rate:g}" for rate in sorted(rates))
        raise StfsebError(
            f"the network's dropout rates differ ({listed}), so prior_weight='{setting}' has no single value: "
            "give prior_weight as a number"
        )
    (rate,) = rates
    return rate if setting == "rate" else 1.0 - rate
