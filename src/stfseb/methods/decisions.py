"""When not to answer: thresholds on a method's own uncertainty, set on held-out familiar inputs.

`fit` leaves the uncertainties of its validation rows in `method.calibration["held_out"]` (at most 512 order
statistics), so that any coverage or false alarm rate can be asked for later, also of a loaded model.

The threshold is the k-th smallest of n held-out uncertainties, k = ceil((n + 1) coverage): a new input of the
same kind stays at or below it with probability of at least `coverage`. (The validation rows have also chosen
the epoch, one of a few dozen; rows that training never saw make the statement exact.)
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from stfseb.errors import StfsebError
from stfseb.inputs import as_tensor
from stfseb.likelihoods import Classification
from stfseb.methods.calibrated import tempered

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from stfseb.methods.base import Method

HELD_OUT, UNFAMILIAR, ABSTAIN, CONFORMAL = "held_out", "unfamiliar", "abstain", "conformal"
NLL = "validation_nll"  # of training, among the held-out scores: it says whether the network has learnt anything
_KEPT = 512


class NoRuleWarning(UserWarning):
    """Decisions were asked for that nothing was set for."""


class Decisions(NamedTuple):
    """What a method says of N inputs, and where it would rather not."""

    prediction: Tensor
    """Probabilities (N, L), or means (N, D)."""
    uncertainty: Tensor
    """The likelihood's uncertainty, (N,)."""
    abstains: Tensor
    """Whether the uncertainty is above the threshold of `abstain`, (N,)."""
    unfamiliar: Tensor
    """Whether it is above that of `ood_threshold`, (N,)."""


@torch.no_grad()
def held_out_scores(
    method: Method, batches: Iterable[tuple[Tensor, Tensor | None]], samples: int, seed: int = 0
) -> dict[str, Any]:
    """Return the uncertainties of held-out rows as JSON: order statistics, and the errors up to each."""
    scores, errors = [], []
    for x, y in batches:
        outputs = tempered(method.calibration, method.likelihood, method.sample_logits(x, samples, seed=seed))
        scores.append(method.likelihood.uncertainty(outputs).cpu().numpy())
        if y is not None and isinstance(method.likelihood, Classification):
            wrong = method.likelihood.predict(outputs).argmax(-1) != y.to(outputs.device)
            errors.append(wrong.cpu().numpy())
    values = np.nan_to_num(np.concatenate(scores))  # a network of one class is never uncertain: -inf
    order = np.argsort(values, kind="stable")
    ranks = np.unique(np.linspace(1, len(values), min(_KEPT, len(values))).round().astype(int))
    found: dict[str, Any] = {
        "rows": len(values),
        "ranks": ranks.tolist(),
        "uncertainty": values[order][ranks - 1].tolist(),
        "samples": samples,
        "seed": seed,
    }
    if errors:
        found["errors"] = np.cumsum(np.concatenate(errors)[order])[ranks - 1].tolist()
    return found


def threshold_rule(held_out: dict[str, Any], coverage: float) -> dict[str, Any]:
    """Return the threshold that at least `coverage` of familiar inputs stay under, and what is known of it."""
    rows = held_out["rows"]
    rank = math.ceil(round((rows + 1) * coverage, 9))
    if rank > rows:
        raise StfsebError(
            f"coverage {coverage:g} cannot be promised from {rows} held-out rows: give at least "
            f"{math.ceil(round(coverage / (1 - coverage), 9))}, or a lower coverage"
        )
    place = int(np.searchsorted(held_out["ranks"], rank))
    rule = {
        "threshold": held_out["uncertainty"][place],
        "images": rows,
        "samples": held_out["samples"],
        "seed": held_out["seed"],
    }
    if "errors" in held_out:
        rule["risk"] = held_out["errors"][place] / held_out["ranks"][place]
    return rule


class DecidingMixin:
    """The part of a method that decides whether to answer."""

    calibration: dict[str, Any]

    def abstain(
        self: Any, coverage: float = 0.95, held_out: Any = None, *, samples: int | None = None, seed: int = 0
    ) -> dict[str, Any]:
        """Answer the most certain `coverage` of familiar inputs, and abstain from the rest, from now on.

        Args:
            coverage: the fraction of familiar inputs to answer.
            held_out: familiar inputs that training has not seen: x, or (x, y) to learn the error rate among
                the answered (`risk`); by default the validation rows of `fit`.
            samples: Monte Carlo samples (by default the method's own).
            seed: of the masks, for held-out rows and decisions alike.

        Returns:
            The rule, also kept in `calibration["abstain"]` and so in saved models.
        """
        _check_fraction("coverage", coverage)
        rule = threshold_rule(_held_out(self, held_out, samples, seed), coverage)
        self.calibration[ABSTAIN] = {"coverage": coverage, **rule}
        return dict(self.calibration[ABSTAIN])

    def ood_threshold(
        self: Any, fpr: float = 0.05, familiar: Any = None, *, samples: int | None = None, seed: int = 0
    ) -> dict[str, Any]:
        """Call inputs unfamiliar when they are less certain than all but `fpr` of the familiar ones.

        The arguments are those of `abstain`; the rule is kept in `calibration["unfamiliar"]`.
        """
        _check_fraction("fpr", fpr)
        rule = threshold_rule(_held_out(self, familiar, samples, seed), 1.0 - fpr)
        self.calibration[UNFAMILIAR] = {"score": "msp", "false_alarms": fpr, **rule}
        return dict(self.calibration[UNFAMILIAR])

    def decide(self: Any, x: Any, samples: int | None = None, *, seed: int | None = None) -> Decisions:
        """Return predictions, their uncertainty, and where the rules of `abstain` and `ood_threshold` apply.

        Samples and seed are those of the rules unless given (without rules, those of `fit`'s validation). A rule that
        was never set applies to no input; where neither was, a warning says so.
        """
        if not any(name in self.calibration for name in (ABSTAIN, UNFAMILIAR)):
            warnings.warn(
                "no rule is set, so no input is abstained from and none is unfamiliar: call abstain(coverage=0.95) or "
                "ood_threshold(fpr=0.05) first (after training in a loop of your own with held-out images)",
                NoRuleWarning,
                stacklevel=2,
            )
        decisions: Decisions = self.judged(x, samples, seed=seed)
        return decisions

    def judged(self: Any, x: Any, samples: int | None = None, *, seed: int | None = None) -> Decisions:
        """Return what `decide` returns, for callers to whom it is the same whether there are rules."""
        draws = [self.draw_of(name) for name in (ABSTAIN, UNFAMILIAR)]
        found = []
        for own_samples, own_seed in dict.fromkeys(draws):  # one pass, unless the rules were set with different draws
            parts = self._over_rows(
                self.judge,
                as_tensor(x, "x"),
                own_samples if samples is None else samples,
                own_seed if seed is None else seed,
            )
            found.append(Decisions(*(torch.cat(column) for column in zip(*parts, strict=True))))
        return found[0] if len(found) == 1 else found[0]._replace(unfamiliar=found[1].unfamiliar)

    def draw_of(self: Any, name: str) -> tuple[int, int]:
        """Return the samples and the seed of a rule, else of the other one, of validation, or the method's own."""
        other = UNFAMILIAR if name == ABSTAIN else ABSTAIN
        known: dict[str, Any] = self.calibration
        rule = known.get(name) or known.get(other) or known.get(HELD_OUT) or {}
        return int(rule.get("samples", self.samples)), int(rule.get("seed", 0))

    def rule_draw(self: Any) -> tuple[int, int]:
        """Return the samples and the seed that the rules were set with: decisions should take the same."""
        one: tuple[int, int] = self.draw_of(ABSTAIN)
        other = self.draw_of(UNFAMILIAR)
        if one != other:
            raise StfsebError(
                f"abstain was set with (samples, seed) = {one} and ood_threshold with {other}: set both with the same, "
                "or give samples"
            )
        return one

    def judge(self: Any, outputs: Tensor) -> Decisions:
        """Return what `decide` does, from (tempered) outputs (S, N, L) that are there already."""
        uncertainty = self.likelihood.uncertainty(outputs)
        limits = [self.calibration.get(name, {}).get("threshold", math.inf) for name in (ABSTAIN, UNFAMILIAR)]
        return Decisions(self._prediction(outputs), uncertainty, uncertainty > limits[0], uncertainty > limits[1])


def _held_out(method: Method, data: Any, samples: int | None, seed: int) -> dict[str, Any]:
    if data is None:
        if HELD_OUT not in method.calibration:
            raise StfsebError("no held-out rows are known: fit the method with stfseb.fit, or give held-out data")
        return dict(method.calibration[HELD_OUT])
    if hasattr(data, "images"):
        data = (data.images, getattr(data, "labels", None))
    samples = method.samples if samples is None else samples
    x, y = data if isinstance(data, tuple | list) else (data, None)
    x = as_tensor(x, "held_out")
    y = None if y is None else as_tensor(y, "held_out labels")
    targets = [None] * -(-len(x) // 1024) if y is None else y.split(1024)
    return held_out_scores(method, zip(x.split(1024), targets, strict=True), samples, seed)


def _check_fraction(name: str, value: float) -> None:
    if not 0.0 < value < 1.0:
        raise StfsebError(f"{name}={value}: give a fraction between 0 and 1")
