"""The final of a search: its best short trials, trained as long as the task trains.

Short trials are good for throwing settings out and less good for the last choice: what learns fastest need not end
best, and how strongly a prior should hold is not seen before a network can overfit. So the first study's trials make
a short list, and the final is a search of its own with this list in place of random draws and nothing pruned. The
rules then choose among the finalists, on the same validation and held-back images.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from stfseb.data.tasks import load_task
from stfseb.errors import StfsebError
from stfseb.experiments.search.plan import written
from stfseb.experiments.search.pruning import Pruning
from stfseb.experiments.search.rules import choose, tempered_nll

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from stfseb.experiments.search.plan import Plan
    from stfseb.experiments.search.rules import Trial

_ENOUGH = 5  # finalists for a rank correlation to say anything


@dataclass(frozen=True)
class Shortlist:
    """Where the finalists come from, and who they are."""

    of: str  # the study of the short trials
    trials: int  # that it was asked for
    epochs: int  # of the short trials
    asked: int  # finalists that were asked for; there are fewer where fewer settings were trained to their end
    finalists: tuple[dict[str, Any], ...]  # the best first: `trial`, its number there, `params`, and what it reached

    @property
    def in_words(self) -> str:
        """Return how many finalists of how many trials there are, and why not more."""
        count = len(self.finalists)
        few = f" ({self.asked} were asked for: no more settings were trained to their end)"
        words = f"{count} finalist{'s' * (count != 1)} of {self.trials} trials"
        return words + few * (count < self.asked)


@dataclass(frozen=True)
class Standing:
    """A finalist among the finalists, after its short trial and at its end, by NLL after one temperature."""

    index: int  # in the final
    trial: int  # in the study of short trials
    before: float
    rank_before: int
    outcome: str  # "complete", or why there is no more
    epochs: int = 0
    after: float | None = None
    rank_after: int | None = None


def called(found: Mapping[str, Any], index: int) -> str:
    """Return what a trial of a search is called: of a final, with its number among the short trials."""
    listed = found["plan"].get("shortlist")
    return f"trial {index}" if listed is None else f"finalist {index} (trial {listed['finalists'][index]['trial']})"


def epochs(count: int) -> str:
    """Return a number of epochs in words."""
    return f"{count} epoch{'s' * (count != 1)}"


def short_list(trials: Sequence[Trial], count: int, chance: float = math.inf) -> tuple[dict[str, Any], ...]:
    """Return `count` different settings, ordered by NLL after one temperature, ties by number.

    Half of them, rounded up, have the lowest NLL. The next is what our rule chooses among the short trials: a final
    without it could not say whether the choice holds. Others follow by what that rule looks at besides, the AUROC
    against held-back context images: those that no setting beats in both, then those that only these beat, and so on,
    of each such front the lowest NLL first. NLL alone leaves out strong priors, which detect best and learn slowly.
    What has not learnt at all (an NLL of `chance` or more) has an AUROC that says nothing, and is taken last.
    """
    whole = sorted((t for t in trials if t["outcome"] == "complete"), key=lambda t: (tempered_nll(t), t["index"]))
    different: dict[str, Trial] = {}
    for one in whole:
        different.setdefault(written(one["params"]), one)
    ordered = list(different.values())
    taken = ordered[: (count + 1) // 2]
    chosen = choose(ordered, "ours").trial
    for front in ([] if chosen is None else [chosen], *_fronts(ordered, chance)):
        taken += [t for t in front if t not in taken][: count - len(taken)]
    kept = ("tempered_nll", "tempered_auroc")
    return tuple(
        {"trial": t["index"], "params": t["params"], "nll": t["nll"]} | {name: t["metrics"][name] for name in kept}
        for t in ordered
        if t in taken
    )


def _fronts(ordered: Sequence[Trial], chance: float) -> Iterator[list[Trial]]:
    """Yield the trials, given by rising NLL, in sets of which none beats another in NLL and AUROC both."""
    left = [t for t in ordered if tempered_nll(t) < chance]
    while left:
        front: list[Trial] = []
        for one in left:
            if not front or _auroc(one) > _auroc(front[-1]):
                front.append(one)
        yield front
        left = [t for t in left if t not in front]
    yield [t for t in ordered if tempered_nll(t) >= chance]


def _auroc(trial: Trial) -> float:
    found = trial["metrics"].get("tempered_auroc")
    return 0.0 if found is None else float(found)  # without held-back images all are alike, and NLL decides


def check_finalists(plan: Plan, trials: int, finalists: int) -> None:
    """Refuse a final that cannot be, before anything is trained for it."""
    if finalists < 0:
        raise StfsebError(f"--finalists {finalists}: give how many of the best trials, or 0 for no final")
    if not finalists:
        return
    if finalists > trials:
        raise StfsebError(
            f"--finalists {finalists}: no more than --trials {trials} can be taken; lower it or raise --trials"
        )
    own, short = int(load_task(plan.task).training["epochs"]), int(plan.training["epochs"])
    if short >= own:
        raise StfsebError(
            f"--finalists {finalists}: trials of {epochs(short)} are no shorter than the task's own {own}; "
            f"give --epochs below {own}, or leave --finalists out"
        )


def final_plan(plan: Plan, trials: Sequence[Trial], asked: int, finalists: int) -> Plan | None:
    """Return the final of a finished search of `asked` trials; None where no trial can be a finalist."""
    task = load_task(plan.task)
    first = short_list(trials, finalists, math.log(task.classes) - Pruning().collapse_margin)
    if not first:
        return None
    listed = Shortlist(plan.name, asked, int(plan.training["epochs"]), finalists, first)
    longer = {"epochs": task.training["epochs"]}
    return replace(plan, training={**plan.training, **longer}, shortlist=listed)


def standings(found: Mapping[str, Any]) -> list[Standing]:
    """Return the finalists of a final (the contents of its search.json), by where they ended; else nothing."""
    listed = found["plan"].get("shortlist")
    if listed is None:
        return []
    ends = {t["index"]: t for t in found["trials"]}
    whole = [t for t in ends.values() if t["outcome"] == "complete"]
    whole.sort(key=lambda t: (tempered_nll(t), t["index"]))
    ranks = {t["index"]: place for place, t in enumerate(whole, 1)}
    all_of_them = [
        Standing(
            index,
            one["trial"],
            one["tempered_nll"],
            index + 1,
            ends.get(index, {}).get("outcome", "not finished"),
            ends.get(index, {}).get("epochs", 0),
            ends[index]["metrics"]["tempered_nll"] if index in ranks else None,
            ranks.get(index),
        )
        for index, one in enumerate(listed["finalists"])
    ]
    return sorted(all_of_them, key=lambda s: (s.rank_after is None, s.rank_after or 0, s.index))


def rank_correlation(found: Mapping[str, Any]) -> float | None:
    """Return Spearman's correlation of short and full training; None for fewer than five finalists that ended."""
    ranks = [(s.rank_before, s.rank_after) for s in standings(found) if s.rank_after is not None]
    if len(ranks) < _ENOUGH:
        return None
    from scipy.stats import spearmanr

    before, after = zip(*ranks, strict=True)
    return float(spearmanr(before, after).statistic)
