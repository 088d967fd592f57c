"""Which trial is chosen. Both rules look at validation and held-back context images alone.

`paper`: the lowest validation NLL (of the best epoch, as training saw it).

`ours`: every trial gets one temperature, fitted on the validation split, which takes mere over- or underconfidence
out of the comparison. Among the trials whose validation NLL then lies within one standard error of the lowest, the
one that best tells validation images from held-back context images (AUROC of the tempered maximum probability).
The standard error is that of the lowest trial's own mean over the validation images, s / sqrt(n), as in Breiman's
one-standard-error rule: how far another validation split of this size would move the figure. (The standard error of
paired differences is smaller, because trials find the same images hard; it would ask which trial is better on such
images by however little, where the rule asks what may be given up unnoticed for a better detector.)
Trials on a tie go by NLL, then by number. Pruned, diverged and failed trials are never chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

RULES = ("paper", "ours")
Trial = dict[str, Any]  # a finished trial as `Store.trials` and search.json hold it


@dataclass(frozen=True)
class Choice:
    """A rule's choice: the trial, or None where no trial can be chosen, and what must be said about it."""

    rule: str
    trial: Trial | None
    why: str
    rests_on: frozenset[int] = frozenset()  # the trials without which another might have been chosen


def choose(trials: Iterable[Trial], rule: str) -> Choice:
    """Return what a rule ("paper" or "ours") chooses among finished trials."""
    whole = sorted((t for t in trials if t["outcome"] == "complete"), key=lambda t: t["index"])
    if not whole:
        return Choice(rule, None, "no trial was trained to its end")
    if rule == "paper":
        lowest = min(whole, key=lambda t: float(t["nll"]))
        return Choice(rule, lowest, "lowest validation NLL", frozenset({lowest["index"]}))
    best = min(whole, key=tempered_nll)
    error = best["metrics"]["tempered_nll_se"]
    near = [t for t in whole if tempered_nll(t) <= tempered_nll(best) + error]
    scored = [t for t in near if t["metrics"].get("tempered_auroc") is not None]
    if not scored:
        why = "lowest validation NLL after one temperature: no held-back context images to tell apart"
        return Choice(rule, best, why, frozenset({best["index"]}))
    chosen = min(scored, key=lambda t: (-t["metrics"]["tempered_auroc"], tempered_nll(t)))
    among = f"{len(near)} trial{'s' * (len(near) > 1)} within {error:.4f} of the lowest NLL {tempered_nll(best):.4f}"
    why = f"highest AUROC against held-back context images among {among}"
    return Choice(rule, chosen, why, frozenset({best["index"], chosen["index"]}))


def tempered_nll(trial: Trial) -> float:
    """Return a trial's validation NLL after one temperature."""
    return float(trial["metrics"]["tempered_nll"])
