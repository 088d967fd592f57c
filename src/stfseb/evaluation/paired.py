"""Is one method better than another? Differences over the seeds that both were run with.

Two runs with one seed share their initial weights, the order of the data and the validation split, so that the
difference of a pair varies less than either result: with d_s = ours_s - theirs_s over n common seeds,

    mean(d) +- t_{n-1, (1 + level)/2} sd(d) / sqrt(n),     sd with n - 1 in the denominator,

is the interval of the paired t test. It assumes that the differences are about normal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stfseb.errors import StfsebError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences, ours minus theirs, and its confidence interval."""

    mean: float
    low: float | None
    """Lower end; None with a single common seed, which says nothing of the spread."""
    high: float | None
    seeds: tuple[int, ...]
    """The seeds that both have."""
    level: float = 0.95

    @property
    def significant(self) -> bool:
        """Whether the interval exists and leaves out zero."""
        return self.low is not None and self.high is not None and not self.low <= 0.0 <= self.high

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.mean:+.4g} (1 seed, no interval)"
        return f"{self.mean:+.4g} [{self.low:+.4g}, {self.high:+.4g}] ({len(self.seeds)} seeds)"


def paired(ours: Mapping[int, float], theirs: Mapping[int, float], level: float = 0.95) -> Difference:
    """Return the mean difference over common seeds with its interval of probability `level`.

    Args:
        ours: a metric by seed.
        theirs: the same metric of the other method by seed; seeds that only one of them has are left out.
        level: coverage of the interval.
    """
    if not 0 < level < 1:
        raise StfsebError(f"level={level}: give a number between 0 and 1, for example 0.95")
    seeds = tuple(sorted(set(ours) & set(theirs)))
    if not seeds:
        raise StfsebError(f"no common seeds ({sorted(ours)} and {sorted(theirs)}): run both with the same ones")
    differences = [float(ours[seed]) - float(theirs[seed]) for seed in seeds]
    for seed, difference in zip(seeds, differences, strict=True):
        if not math.isfinite(difference):
            raise StfsebError(f"seed {seed}: {ours[seed]} and {theirs[seed]} are not both finite: leave the seed out")
    count = len(seeds)
    mean = math.fsum(differences) / count
    if count == 1:
        return Difference(mean, None, None, seeds, level)
    from scipy.special import stdtrit

    spread = math.sqrt(math.fsum((d - mean) ** 2 for d in differences) / (count - 1))
    half = float(stdtrit(count - 1, (1 + level) / 2)) * spread / math.sqrt(count)
    return Difference(mean, mean - half, mean + half, seeds, level)
