"""The trials of a search in SQLite or PostgreSQL: who has which, who is done, who died.

All draws are put into the study when it is made, each with its number k as `index`, so that the count is exact by
construction: a worker takes a waiting draw or none. A worker shows that it lives by heartbeats; when they stop, the
trial is failed and its draw waits again, with the same settings. Every write happens under one lock, an advisory
lock in PostgreSQL and an flock beside an SQLite file, which the system takes back from a worker that dies.
A draw that repeats an earlier one is not trained again: it gets that one's result. Draws that the study does not have
yet and a search.json has as finished are put in finished, so that a search goes on where its study is not kept.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stfseb.errors import StfsebError
from stfseb.experiments.search.plan import Plan, distributions, quiet_optuna, written
from stfseb.experiments.search.storage import Lock, hushed, open_url, readable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from optuna import Study
    from optuna.trial import FrozenTrial, TrialState

    from stfseb.experiments.search.rules import Trial

_RETRIES = 3  # a trial that four workers died over is given up
_PATIENCE = (1, 2, 4, 8, 15)  # seconds between tries to write a result down
_FINISHED = ("complete", "pruned", "diverged", "failed")


@dataclass(frozen=True)
class Claim:
    """A draw that this worker has."""

    index: int
    params: dict[str, Any]
    number: int  # of optuna's trial; draws that were given away have several
    id: int


class Store:
    """One study in its storage. `total` is how many trials are asked for.

    Args:
        url: sqlite:///FILE or postgresql://USER:PASSWORD@HOST/DATABASE.
        plan: what is searched; a study that was begun with another plan is refused.
        total: trials in all; draws beyond those the study has are added to it.
        facts: more that all workers must agree on (fingerprints of the data).
        known: finished trials of the same plan and facts, from where the study itself is not.
        heartbeat: seconds between signs of life.
        grace: seconds of silence after which a worker is taken for dead.
    """

    def __init__(
        self,
        url: str,
        plan: Plan,
        total: int,
        *,
        facts: dict[str, Any] | None = None,
        known: Iterable[Trial] = (),
        heartbeat: int = 10,
        grace: int = 60,
    ) -> None:
        if total < 1:
            raise StfsebError(f"trials = {total} must be at least 1")
        import optuna

        quiet_optuna()
        self.plan, self.total, self.heartbeat = plan, total, heartbeat
        self.url, engine = open_url(url)
        self.lock = Lock(self.url, plan.name, engine)
        self._beats: set[int] = set()
        self._stop = threading.Event()
        with ExitStack() as opened:
            opened.callback(self.lock.close)
            with self.held():
                self.storage = optuna.storages.RDBStorage(
                    self.url, engine, heartbeat_interval=heartbeat, grace_period=max(grace, heartbeat + 1)
                )
                opened.callback(self.storage.engine.dispose)
                self.study: Study = optuna.create_study(storage=self.storage, study_name=plan.name, load_if_exists=True)
                self._agree({"plan": plan.identity, **(facts or {})})
                self._enqueue({t["index"]: t for t in known})
            self._opened = opened.pop_all()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; trials that are still claimed go stale."""
        self.storage.remove_session()
        self._opened.close()

    # What workers do ---------------------------------------------------------------------------------

    def claim(self) -> Claim | None:
        """Return a draw to train, or None where all are done or with other workers."""
        from optuna.trial import TrialState

        with self.held():
            by_index = self._settle()
            for index in range(self.total):
                latest = by_index[index][-1]
                if latest.state == TrialState.WAITING and latest.user_attrs.get("same_as") is None:
                    # The first sign of life comes before the trial is ours: without any it would never go stale.
                    self.storage.record_heartbeat(latest._trial_id)
                    self.storage.set_trial_state_values(latest._trial_id, TrialState.RUNNING)
                    self._beats.add(latest._trial_id)
                    return Claim(index, dict(latest.params), latest.number, latest._trial_id)
        return None

    def finish(self, claim: Claim, result: dict[str, Any]) -> bool:
        """Write down how a trial ended; False if it had been given to another worker, whose result counts."""
        for wait in _PATIENCE:
            try:
                return self._finish(claim, result)
            except StfsebError:  # a server that is away for a moment: a trained trial is worth some waiting
                time.sleep(wait)
        return self._finish(claim, result)

    def _finish(self, claim: Claim, result: dict[str, Any]) -> bool:
        from optuna.trial import TrialState

        with self.held():
            self._beats.discard(claim.id)
            if self.storage.get_trial(claim.id).state != TrialState.RUNNING:
                return False
            self._write(claim.id, claim.number, result)
            return True

    def release(self, claims: Iterable[Claim]) -> None:
        """Give back draws that were not finished, for the next worker to take at once."""
        from optuna.trial import TrialState

        with self.held():
            for claim in claims:
                self._beats.discard(claim.id)
                if self.storage.get_trial(claim.id).state == TrialState.RUNNING:
                    self.storage.set_trial_user_attr(claim.id, "released", True)
                    self.study.tell(claim.number, state=TrialState.FAIL)

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Send heartbeats for this worker's trials from a thread, as long as the block lasts."""
        self._stop.clear()
        thread = threading.Thread(target=self._beat, daemon=True, name="heartbeat")
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    # What there is to see ----------------------------------------------------------------------------

    def trials(self) -> list[Trial]:
        """Return the finished trials as plain data, by index."""
        with readable(self.url):
            found = self._by_index()
        ends = {index: end for index, tries in found.items() if (end := _end(tries)) is not None}
        return [
            {"index": index, "params": dict(end.params), **end.user_attrs["result"]}
            | {name: end.user_attrs[name] for name in ("same_as",) if name in end.user_attrs}
            for index, end in sorted(ends.items())
            if index < self.total
        ]

    def left(self) -> int:
        """Return how many trials are not finished."""
        return self.total - len(self.trials())

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the study alone; a storage that fails is told in one line."""
        with self.lock(), readable(self.url), hushed():
            yield

    # Inside the lock ---------------------------------------------------------------------------------

    def _agree(self, facts: dict[str, Any]) -> None:
        known = self.study.user_attrs
        for name, value in json.loads(json.dumps(facts)).items():
            if name not in known:
                self.study.set_user_attr(name, value)
            elif known[name] != value:
                raise StfsebError(
                    f"the study {self.plan.name} was begun with other {difference(known[name], value, name)}: "
                    "use the same data and options, or another storage (--out or --storage)"
                )

    def _enqueue(self, known: dict[int, Trial]) -> None:
        import optuna

        have = len(self._by_index())
        spaces = distributions(self.plan.choices)
        first: dict[str, int] = {}
        # What is known beyond the asked number is kept too: search.json, which is written anew, will not have it.
        for index, params in enumerate(self.plan.draws(max(self.total, *(k + 1 for k in known), 0))):
            earlier = first.setdefault(written(params), index)
            if index >= have:
                attrs: dict[str, Any] = {"index": index} | ({"same_as": earlier} if earlier != index else {})
                state, value = optuna.trial.TrialState.WAITING, None
                if index in known and known[index]["params"] == params:
                    kept = {k: v for k, v in known[index].items() if k not in ("index", "params", "same_as")}
                    attrs["result"], (state, value) = kept, _end_state(kept)
                self.study.add_trial(
                    optuna.create_trial(state=state, value=value, params=params, distributions=spaces, user_attrs=attrs)
                )

    def _settle(self) -> dict[int, list[FrozenTrial]]:
        """Fail what is stale, queue again what was failed, finish repeats; return the tries of every draw."""
        import optuna
        from optuna.trial import TrialState

        optuna.storages.fail_stale_trials(self.study)
        by_index = self._by_index()
        changed = False
        for index in range(self.total):
            latest = by_index[index][-1]
            if latest.state == TrialState.FAIL and "result" not in latest.user_attrs:
                died = sum("released" not in t.user_attrs for t in by_index[index])
                self._again(latest, died)
                changed = True
            earlier = latest.user_attrs.get("same_as")
            if latest.state == TrialState.WAITING and earlier is not None:
                end = _end(by_index[earlier])
                if end is not None:
                    self.storage.record_heartbeat(latest._trial_id)
                    self.storage.set_trial_state_values(latest._trial_id, TrialState.RUNNING)
                    self._write(latest._trial_id, latest.number, end.user_attrs["result"])
                    changed = True
        return self._by_index() if changed else by_index

    def _again(self, failed: FrozenTrial, died: int) -> None:
        import optuna
        from optuna.trial import TrialState

        attrs: dict[str, Any] = {n: v for n, v in failed.user_attrs.items() if n in ("index", "same_as")}
        if died > _RETRIES:
            attrs["result"] = {"outcome": "failed", "reason": f"{died} workers died over it"}
        self.study.add_trial(
            optuna.create_trial(
                state=TrialState.FAIL if "result" in attrs else TrialState.WAITING,
                params=failed.params,
                distributions=failed.distributions,
                user_attrs=attrs,
            )
        )

    def _write(self, identifier: int, number: int, result: dict[str, Any]) -> None:
        state, value = _end_state(result)
        self.storage.set_trial_user_attr(identifier, "result", result)
        self.study.tell(number, value, state=state)

    def _by_index(self) -> dict[int, list[FrozenTrial]]:
        found: dict[int, list[FrozenTrial]] = {}
        for trial in self.study.get_trials(deepcopy=False):
            found.setdefault(trial.user_attrs["index"], []).append(trial)
        return found

    def _beat(self) -> None:
        while not self._stop.wait(self.heartbeat):
            try:
                with self.lock():
                    for identifier in list(self._beats):
                        self.storage.record_heartbeat(identifier)
            except Exception:
                continue  # a storage that is away for a moment: the next claim or the next beat will tell


def _end_state(result: dict[str, Any]) -> tuple[TrialState, float | None]:
    """Return how optuna calls the end of a trial, and its value."""
    from optuna.trial import TrialState

    outcome = result["outcome"]
    assert outcome in _FINISHED, outcome
    states = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED}
    return states.get(outcome, TrialState.FAIL), result["nll"] if outcome == "complete" else None


def _end(tries: list[FrozenTrial]) -> FrozenTrial | None:
    """Return the finished one among a draw's tries."""
    return next((t for t in tries if t.state.is_finished() and "result" in t.user_attrs), None)


def difference(old: Any, new: Any, name: str) -> str:
    """Name the first entry in which two facts differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(set(old) | set(new)):
            if old.get(key) != new.get(key):
                return difference(old.get(key), new.get(key), key)
    return f"{name} ({old}, now {new})"
