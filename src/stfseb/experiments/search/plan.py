"""What is searched, as plain data, and the draws.

Draw k follows from (space, seed, k) alone: one stream of optuna's `RandomSampler(seed)`, read from its beginning.
Workers share the draws through the study, so that neither their number nor their order changes what is tried, and
a search that is asked for more trials later goes on where the stream was left.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from stfseb.data.tasks import definition_of, load_task
from stfseb.errors import StfsebError
from stfseb.experiments.jobs import Job, make_job
from stfseb.methods.calibrated import AVERAGE
from stfseb.methods.registry import key_of
from stfseb.methods.search_spaces import Space, search_space

if TYPE_CHECKING:
    from stfseb.experiments.search.finals import Shortlist


@dataclass(frozen=True)
class Plan:
    """A search without its length: all that the results of trial k depend on."""

    task: str  # a built-in task's name or the path of a task file
    method: str
    space: str
    seed: int
    base: dict[str, Any]  # settings that are not searched: the task's preset, and what was given over it
    training: dict[str, Any]  # complete
    context: str | None = None
    shortlist: Shortlist | None = None  # of a final: the trials of another study that are tried in place of draws

    @property
    def choices(self) -> Space:
        """Return the values that are tried, by setting."""
        return search_space(self.method, self.space)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Return what must be equal for two workers to share a study; files edited later do not change it."""
        known = {**asdict(self), "task": load_task(self.task).name, "choices": self.choices}
        if self.shortlist is None:
            del known["shortlist"]  # studies that were begun before there were finals have no such entry
        known["temperature"] = AVERAGE
        if definition := definition_of(self.task):
            known["task file"] = definition
        return json.loads(json.dumps(known))  # type: ignore[no-any-return]

    @property
    def name(self) -> str:
        """Return the study's name: TASK-METHOD-SPACE, and a fingerprint of what is not the task's default.

        A final has the name of the study that its short list is from, and says how many there are of how many trials.
        """
        if self.shortlist is not None:
            return f"{self.shortlist.of}-final{self.shortlist.asked}of{self.shortlist.trials}"
        task = load_task(self.task)
        known = [self.seed, self.context, self.training, AVERAGE]
        copies = self.base.get("context_copies")  # where there are none the name is as it was before there were any
        preset = make_job(self.task, self.method).settings
        changed = {k: v for k, v in self.base.items() if k != "context_copies" and preset.get(k) != v}
        more = [*([copies] if copies else []), *([changed] if changed else [])]
        plain = not more and known[:3] == [0, None, dict(task.training)]
        name = f"{task.name}-{self.method}-{self.space}"
        return name if plain else f"{name}-{_fingerprint([*known, *more])}"

    def job(self, params: dict[str, Any]) -> Job:
        """Return the run of a trial: trained with seed 0 whatever the seed of the draws."""
        return Job(self.task, self.method, 0, {**self.base, **params}, self.training, self.context)

    def draws(self, count: int) -> list[dict[str, Any]]:
        """Return the settings of trials 0 ... count - 1."""
        if self.shortlist is not None:
            listed = self.shortlist.finalists
            if count > len(listed):
                raise StfsebError(f"the final {self.name} has {len(listed)} finalists, not {count}")
            return [dict(one["params"]) for one in listed[:count]]
        import optuna

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            quiet_optuna()
            study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=self.seed))
            spaces = distributions(self.choices)
            return [study.ask(spaces).params for _ in range(count)]


def make_plan(
    task: str,
    method: str,
    space: str = "paper",
    *,
    seed: int = 0,
    training: dict[str, Any] | None = None,
    context: str | None = None,
    settings: dict[str, Any] | None = None,
) -> Plan:
    """Return the plan of a search; settings outside the space are these, and else those of the task's preset."""
    key = key_of(method)
    if key == "ensemble":
        raise StfsebError("an ensemble has no settings of its own to search: search its members' method, --method map")
    choices = search_space(key, space)
    for name in settings or {}:
        if name in choices:
            tried = ", ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in choices[name])
            raise StfsebError(f"{name} is searched here ({tried}): leave it out, or give a setting that is not")
    job = make_job(task, key, settings=settings, training=training, context=context)
    base = {name: value for name, value in job.settings.items() if name not in choices}
    return Plan(task, key, space, seed, base, job.training, context)


def written(params: dict[str, Any]) -> str:
    """Return settings as text, equal for equal ones."""
    return json.dumps(params, sort_keys=True)


def distributions(choices: Space) -> dict[str, Any]:
    """Return optuna's categorical distributions of a space."""
    from optuna.distributions import CategoricalDistribution

    return {name: CategoricalDistribution(values) for name, values in choices.items()}


def quiet_optuna() -> None:
    """Leave to optuna's log what is an error; progress is ours to show."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)


def _fingerprint(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]
