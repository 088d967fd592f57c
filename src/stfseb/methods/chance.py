"""At chance: a validation NLL no better than that of a guess, of a network that has learnt nothing.

A guess gives every class the same probability: its NLL is ln(classes) nats.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from stfseb.likelihoods import Binary, Categorical

if TYPE_CHECKING:
    from stfseb.likelihoods import Likelihood

MARGIN = 0.01  # nats below ln(classes) that still count as chance
REMEDY = "train longer if these were few steps; else try another seed, a larger sigma or tau2, or a lower learning rate"


def classes_of(likelihood: Likelihood, outputs: int | None) -> int:
    """Return among how many classes a network of so many outputs chooses; 1 where it chooses none, or nobody knows."""
    if isinstance(likelihood, Binary):
        return 2
    return outputs if isinstance(likelihood, Categorical) and outputs else 1


def at_chance(nll: float, classes: int) -> bool:
    """Tell whether this validation NLL is that of a guess among so many classes, or above it."""
    return classes > 1 and nll >= math.log(classes) - MARGIN
