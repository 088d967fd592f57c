"""Which trial is chosen. All rules look at validation and held-back context images alone.

`paper`: the lowest validation NLL (of the best epoch, as training saw it).

`ours`: every trial gets one temperature, fitted on the validation split, which takes mere over- or underconfidence
out of the comparison. Among the trials whose validation NLL then lies within one standard error of the lowest, the
one that best tells validation images from held-back context images (AUROC of the tempered maximum probability).
The standard error is that of the lowest trial's own mean over the validation images, s / sqrt(n), as in Breiman's
one-standard-error rule: how far another validation split of this size would move the figure. (The standard error of
paired differences is smaller, because trials find the same images hard; it would ask which trial is better on such
images by however little, where the rule asks what may be given up unnoticed for a better detector.)

`level`: as ours, but of the AUROC too as much may be given up as other images would move it: among the same trials, of
those whose AUROC plus its own standard error reaches the highest the one with the lowest NLL. With 1,000 held-back
images 99.95 % is level with 100 %. Where all detect the held-back images nearly without a fault, ours goes by the
sixth digit of an AUROC and gives away up to one standard error of NLL for it. For the standard error the rule must
know of how many images AUROCs are.

Trials on a tie go by NLL, then by number. Pruned, diverged and failed trials are never chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from stfseb.evaluation.ood import auroc_error

if TYPE_CHECKING:
    from collections.abc import Iterable

RULES = ("paper", "ours", "level")
Trial = dict[str, Any]  # a finished trial as `Store.trials` and search.json hold it


class Images(NamedTuple):
    """How many images a search's AUROCs are of."""

    validation: int
    held_back: int


@dataclass(frozen=True)
class Choice:
    """A rule's choice: the trial, or None where no trial can be chosen, and what must be said about it."""

    rule: str
    trial: Trial | None
    why: str
    rests_on: frozenset[int] = frozenset()  # the trials without which another might have been chosen


def choose(trials: Iterable[Trial], rule: str, images: Images | None = None) -> Choice:
    """Return what a rule ("paper", "ours" or "level", which asks for the images) chooses among finished trials."""
    # A draw that repeats an earlier one is the same trial.
    ended = (t for t in trials if t["outcome"] == "complete" and t.get("same_as") is None)
    whole = sorted(ended, key=lambda t: t["index"])
    if not whole:
        return Choice(rule, None, "no trial was trained to its end")
    if rule == "paper":
        lowest = min(whole, key=lambda t: float(t["nll"]))
        return Choice(rule, lowest, "lowest validation NLL", frozenset({lowest["index"]}))
    best = min(whole, key=tempered_nll)
    error = best["metrics"]["tempered_nll_se"]
    near = [t for t in whole if tempered_nll(t) <= tempered_nll(best) + error]
    scored = [t for t in near if _auroc(t) is not None]
    if not scored:
        why = "lowest validation NLL after one temperature: no held-back context images to tell apart"
        return Choice(rule, best, why, frozenset({best["index"]}))
    among = (
        f"{len(near)} trial{'s' * (len(near) > 1)} within {error:.4f} of the lowest NLL at T {tempered_nll(best):.4f}"
    )
    highest = min(scored, key=lambda t: (-_auroc(t), tempered_nll(t)))
    if rule == "ours":
        why = f"highest AUROC against held-back context images among {among}"
        return Choice(rule, highest, why, frozenset({best["index"], highest["index"]}))
    if images is None:
        return Choice(rule, None, "of how many images the AUROCs are was not written down: run the search again")
    level = [t for t in scored if _auroc(t) + auroc_error(_auroc(t), *images) >= _auroc(highest)]
    chosen = min(level, key=tempered_nll)
    why = f"lowest NLL at T of {len(level)} whose AUROC plus its standard error reaches the highest, among {among}"
    return Choice(rule, chosen, why, frozenset({best["index"], highest["index"], chosen["index"]}))


def tempered_nll(trial: Trial) -> float:
    """Return a trial's validation NLL after one temperature."""
    return float(trial["metrics"]["tempered_nll"])


def _auroc(trial: Trial) -> Any:
    return trial["metrics"].get("tempered_auroc")
