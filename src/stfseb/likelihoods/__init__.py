"""What the outputs of a network mean: a replaceable piece, so that methods never ask."""

from __future__ import annotations

from typing import Any

from stfseb.errors import StfsebError, unknown
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
    "chosen",
    "from_spec",
]

LIKELIHOODS: dict[str, type[Likelihood]] = {
    kind.name: kind for kind in (Categorical, Binary, MultiLabel, GaussianRegression, StudentTRegression)
}


def chosen(likelihood: Any) -> Likelihood:
    """Return the likelihood, categorical where there is None."""
    if likelihood is None:
        return Categorical()
    if isinstance(likelihood, Likelihood):
        return likelihood
    if isinstance(likelihood, type) and issubclass(likelihood, Likelihood):
        raise StfsebError(f"likelihood={likelihood.__name__} is a class: give {likelihood.__name__}()")
    if likelihood in LIKELIHOODS:
        kind = LIKELIHOODS[likelihood].__name__
        raise StfsebError(f"likelihood={likelihood!r} is a name: give stfseb.likelihoods.{kind}()")
    raise StfsebError(f"likelihood={likelihood!r}: give one of stfseb.likelihoods, for example Binary()")


def from_spec(spec: dict[str, Any] | str) -> Likelihood:
    """Undo `Likelihood.spec`; a name alone means the default settings."""
    settings = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = str(settings.pop("name"))
    if name not in LIKELIHOODS:
        raise unknown("likelihood", name, LIKELIHOODS)
    return LIKELIHOODS[name](**settings)
