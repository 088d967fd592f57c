"""What the outputs of a network mean: a replaceable piece, so that methods never ask."""

from __future__ import annotations

from typing import Any

from stfseb.errors import unknown
from stfseb.likelihoods.base import Likelihood
from stfseb.likelihoods.classes import Binary, Categorical, Classification, MultiLabel
from stfseb.likelihoods.regression import GaussianRegression, Regression, StudentTRegression

__all__ = [
    "LIKELIHOODS",
    "Binary",
    "Categorical",
    "Classification",
    "GaussianRegression",
    "Likelihood",
    "MultiLabel",
    "Regression",
    "StudentTRegression",
    "from_spec",
]

LIKELIHOODS: dict[str, type[Likelihood]] = {
    kind.name: kind for kind in (Categorical, Binary, MultiLabel, GaussianRegression, StudentTRegression)
}


def from_spec(spec: dict[str, Any] | str) -> Likelihood:
    """Undo `Likelihood.spec`; a name alone means the default settings."""
    settings = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = str(settings.pop("name"))
    if name not in LIKELIHOODS:
        raise unknown("likelihood", name, LIKELIHOODS)
    return LIKELIHOODS[name](**settings)
