"""When a trial is hopeless, and the proof on a recorded search that no winner is lost.

A trial ends early when it has collapsed (validation NLL of chance for some epochs on end), or when it lags behind
what finished trials had reached by the same epoch in NLL *and* in accuracy, both by wide margins. Accuracy is asked
as well because a temperature does not change it: a trial may be badly scaled, so of a poor NLL, and still win under
a rule that fits a temperature.

`replay_pruning` goes through a search that was recorded without pruning. What is pruned depends on which trials had
finished before, so on the number of workers: for safety it takes the strictest case, every other trial finished
before; what it saves is counted in the order of one worker.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from stfseb.experiments.search.rules import RULES, Images, choose

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stfseb.experiments.search.rules import Trial


@dataclass(frozen=True)
class Pruning:
    """The rule. With `warmup` infinite nothing is pruned."""

    warmup: float = 5  # no trial ends before this many epochs
    behind_after: int = 8  # nor for being behind before this many: strong priors learn slowly at first
    collapse_epochs: int = 3  # at chance for so many epochs on end
    collapse_margin: float = 0.01  # nats below log L that still count as chance
    nll_margin: float = 0.15  # nats behind the best trial at the same epoch
    accuracy_margin: float = 0.05  # and this much behind in accuracy

    def reason(self, nll: Sequence[float], accuracy: Sequence[float], best: Frontier, classes: int) -> str:
        """Return why a trial with this history is hopeless, or "" if it is not."""
        epoch = len(nll)
        if epoch < max(self.warmup, self.collapse_epochs):
            return ""
        chance = math.log(classes) - self.collapse_margin
        if all(value >= chance for value in nll[-self.collapse_epochs :]):
            return f"collapsed: validation NLL {nll[-1]:.3f} is chance"
        reached = best.at(epoch)
        if reached is None or epoch < self.behind_after:
            return ""
        behind, short = min(nll) - reached[0], reached[1] - max(accuracy)
        if behind > self.nll_margin and short > self.accuracy_margin:
            return f"behind by {behind:.2f} nats and {100 * short:.0f} points of accuracy at epoch {epoch}"
        return ""


NEVER = Pruning(warmup=math.inf)


@dataclass
class Frontier:
    """The best NLL and accuracy that finished trials had reached by each epoch."""

    nll: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)

    def add(self, nll: Sequence[float], accuracy: Sequence[float]) -> None:
        """Take in a finished trial; where it stopped early, its last best stands for later epochs."""
        self.nll = _joined(self.nll, list(accumulate(nll, min)), min)
        self.accuracy = _joined(self.accuracy, list(accumulate(accuracy, max)), max)

    def at(self, epoch: int) -> tuple[float, float] | None:
        """Return the best NLL and accuracy by an epoch (1, 2, ...), None before any trial has finished."""
        if not self.nll:
            return None
        place = min(epoch, len(self.nll)) - 1
        return self.nll[place], self.accuracy[place]

    @classmethod
    def of(cls, trials: Iterable[Trial]) -> Frontier:
        """Return the frontier of the trials that were trained to their end."""
        found = cls()
        for trial in trials:
            if trial["outcome"] == "complete":
                found.add(trial["history"]["nll"], trial["history"]["accuracy"])
        return found


@dataclass(frozen=True)
class Replay:
    """What pruning would have done to a recorded search."""

    pruned: list[int]  # trials ended early by one worker in the order of their numbers
    at_risk: list[int]  # trials ended early in some order of finishing; holds `pruned`
    lost: list[str]  # rules whose choice rests on a trial at risk
    epochs: int  # epochs of the whole search
    saved: int  # epochs that one worker would not have trained

    @property
    def safe(self) -> bool:
        """Tell whether the rules that apply choose as without pruning, in whatever order trials finish."""
        return not self.lost


def replay_pruning(record: dict[str, Any], rule: Pruning | None = None) -> Replay:
    """Apply a pruning rule to a search recorded without one (the contents of its search.json)."""
    pruning = rule or Pruning()
    classes, trials = int(record["classes"]), sorted(record["trials"], key=lambda t: t["index"])
    trained = [t for t in trials if t["outcome"] == "complete" and t.get("same_as") is None]
    pruned, at_risk, saved, before = [], [], 0, Frontier()
    for trial in trained:
        others = Frontier.of(t for t in trained if t is not trial)
        if _end(trial, pruning, others, classes) is not None:
            at_risk.append(trial["index"])
        end = _end(trial, pruning, before, classes)
        if end is None:
            before.add(trial["history"]["nll"], trial["history"]["accuracy"])
        else:
            pruned.append(trial["index"])
            saved += len(trial["history"]["nll"]) - end
    epochs = sum(len(t["history"]["nll"]) for t in trained)
    images = Images(**record["images"]) if "images" in record else None  # what is older has none
    rules = [name for name in RULES if name != "level" or images is not None]
    lost = [name for name in rules if choose(trials, name, images).rests_on & set(at_risk)]
    return Replay(pruned, at_risk, lost, epochs, saved)


def _end(trial: Trial, rule: Pruning, best: Frontier, classes: int) -> int | None:
    """Return the epoch after which the trial would have been ended; the last epoch ends it anyway."""
    nll, accuracy = trial["history"]["nll"], trial["history"]["accuracy"]
    for epoch in range(1, len(nll)):
        if rule.reason(nll[:epoch], accuracy[:epoch], best, classes):
            return epoch
    return None


def _joined(old: list[float], new: list[float], better: Any) -> list[float]:
    """Combine two running bests, the shorter one carried on at its last value."""
    if not old or not new:
        return old or new
    return [better(old[min(i, len(old) - 1)], new[min(i, len(new) - 1)]) for i in range(max(len(old), len(new)))]
