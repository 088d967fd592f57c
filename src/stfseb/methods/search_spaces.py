"""The values that a random search tries, for every method, in one place.

`PAPER` has ST-FS-EB's ranges as printed; for the baselines, whose ranges the paper leaves open, the same kind
of grid: the Gaussian prior's scale for MAP, MC Dropout and MFVI, sigma and both taus for FS-EB, kernel, a_eps and
gamma for GFSVI. `EXTENDED` goes on where the printed grid ends too early (on CIFAR-10 the best tau2 lies beyond
100: both taus reach 1e4, in half decades) and leaves out scales of the weight prior at which every network
collapses. For methods with one scale it is finer instead, so that forty draws of it are not forty repeats of five.
"""

from __future__ import annotations

from typing import Any, Protocol

from stfseb.errors import unknown

Space = dict[str, tuple[Any, ...]]


def powers(low: int, high: int) -> tuple[float, ...]:
    """Return 10^low, ..., 10^high."""
    return steps(low, high, (1,))


def half_decades(low: int, high: int) -> tuple[float, ...]:
    """Return 10^low, 3 10^low, 10^(low + 1), ..., 10^high."""
    return steps(low, high, (1, 3))


def steps(low: int, high: int, within: tuple[float, ...]) -> tuple[float, ...]:
    """Return the multiples `within` of each power from 10^low on, up to 10^high itself."""
    values = [float(f"{step:g}e{exponent}") for exponent in range(low, high) for step in within]
    return (*values, float(f"1e{high}"))


_GAUSSIAN: Space = {"sigma": powers(-3, 1)}
_TAUS: Space = {"tau1": powers(-6, 2), "tau2": powers(-6, 2)}
_FINE_GAUSSIAN: Space = {"sigma": steps(-2, 1, (1, 1.5, 2, 3, 5, 7))}
_WIDE_TAUS: Space = {"tau1": half_decades(-4, 4), "tau2": half_decades(-2, 4)}
_DOFS = (2.1, 3.0, 5.0, 10.0, 20.0)

PAPER: dict[str, Space] = {
    "stfseb": {"dof": _DOFS, "sigma": powers(-6, 1), **_TAUS},
    "fseb": {"sigma": powers(-6, 1), **_TAUS},
    "gfsvi": {
        "kernel": ("matern12", "matern32", "matern52", "rbf"),
        "a_eps": (0.001, 0.01, 0.1),
        "gamma": powers(-8, -4),
    },
    "mcdropout": _GAUSSIAN,
    "mfvi": _GAUSSIAN,
    "map": _GAUSSIAN,
    "outlierexposure": {**_GAUSSIAN, "strength": (0.1, 0.3, 0.5, 1.0, 3.0)},
}

EXTENDED: dict[str, Space] = {
    "stfseb": {"dof": _DOFS, "sigma": half_decades(-1, 1), **_WIDE_TAUS},
    "fseb": {"sigma": half_decades(-1, 1), **_WIDE_TAUS},
    "gfsvi": {
        "kernel": ("matern12", "matern32", "matern52", "rbf"),
        "a_eps": (0.001, 0.003, 0.01, 0.03, 0.1, 0.3),
        "gamma": powers(-8, -2),
    },
    "mcdropout": _FINE_GAUSSIAN,
    "mfvi": _FINE_GAUSSIAN,
    "map": _FINE_GAUSSIAN,
    "outlierexposure": {**_FINE_GAUSSIAN, "strength": (0.03, 0.1, 0.3, 0.5, 1.0, 3.0)},
}

SPACES: dict[str, dict[str, Space]] = {"paper": PAPER, "extended": EXTENDED}


class Trial(Protocol):
    """What is asked of a trial; optuna's are such."""

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        """Return one of `choices`."""
        ...


def search_space(method: str, which: str = "paper") -> Space:
    """Return the values to try for a method's settings: name -> choices."""
    if which not in SPACES:
        raise unknown("search space", which, SPACES)
    spaces = SPACES[which]
    if method not in spaces:
        raise unknown("method", method, spaces)
    return dict(spaces[method])


def suggest(trial: Trial, method: str, which: str = "paper") -> dict[str, Any]:
    """Return settings for a method, each drawn by the trial from its choices."""
    return {name: trial.suggest_categorical(name, choices) for name, choices in search_space(method, which).items()}
