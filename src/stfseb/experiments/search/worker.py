"""One worker of a search: claim, train, measure, write down, until the asked number of trials is finished.

With finalists it then does the same on the final, a study of its own (finals.py).
"""

from __future__ import annotations

import time
from itertools import chain
from typing import TYPE_CHECKING, Any

from stfseb.data.tasks import load_task
from stfseb.experiments.search.finals import check_finalists, epochs, final_plan
from stfseb.experiments.search.outcome import check_folder, finished_trials, outcome_of, write_search, written_by
from stfseb.experiments.search.pruning import NEVER, Frontier, Pruning
from stfseb.experiments.search.rules import Images
from stfseb.experiments.search.store import Store
from stfseb.experiments.search.trials import Trainer, search_data
from stfseb.training.interrupts import Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from stfseb.experiments.search.plan import Plan
    from stfseb.experiments.search.rules import Trial
    from stfseb.experiments.search.store import Claim
    from stfseb.experiments.search.trials import History, SearchData


class Watcher:
    """Hears what a search does; every method may be overridden."""

    images: Images | None = None  # how many AUROCs are of; known when the first study opens

    def final(self, plan: Plan) -> None:
        """The trials are all finished; the finalists of this plan's short list come next, and `start` again."""

    def start(self, trials: list[Trial], total: int) -> None:
        """The study is open, with these trials finished already."""

    def epoch(self, claim: Claim, history: History) -> None:
        """A trial of this worker has finished an epoch."""

    def finished(self, claim: Claim, result: dict[str, Any], trials: list[Trial]) -> None:
        """A trial of this worker is finished; `trials` are all that are, of all workers."""

    def waiting(self, trials: list[Trial]) -> None:
        """Nothing is left to take: other workers have the rest."""


def search(
    plan: Plan,
    trials: int,
    folder: Path,
    *,
    storage: str | None = None,
    device: str = "cpu",
    width: int = 3,
    pruning: Pruning | None = None,
    grace: int = 60,
    watcher: Watcher | None = None,
    finalists: int = 0,
) -> dict[str, Any]:
    """Work on a search until `trials` trials are finished; write and return its outcome.

    Any number of workers may do this at once, with the same plan and storage; each writes the same outcome. A search
    that was interrupted goes on, one that is finished is not done again, one that is asked for more trials adds them.

    With `finalists` the trials (of fewer epochs than the task's own) make a short list. When all of them are finished,
    the best are trained as long as the task trains, and the outcome is that of this final, a study beside the first;
    where no trial was trained to its end there is none, and the outcome is that of the trials.

    Args:
        plan: what is searched (`make_plan`).
        trials: finished trials in all, whoever did them: complete, pruned or diverged, each counted once.
        folder: the results folder; the search lies in its searches/STUDY.
        storage: sqlite:///FILE or postgresql://...; by default study.db in the search's folder.
        device: where to train.
        width: trials trained at a time on a CUDA device.
        pruning: when a trial is hopeless; None trains every trial to its end.
        grace: seconds of silence after which another worker is taken for dead.
        watcher: hears of progress.
        finalists: how many of the best trials are trained in full; 0 leaves it at the trials.
    """
    check_finalists(plan, trials, finalists)
    heard = watcher or Watcher()
    material = search_data(load_task(plan.task).load(context=plan.context))
    images = heard.images = _images(material)

    def do(plan: Plan, total: int, pruning: Pruning) -> dict[str, Any]:
        here = folder / "searches" / plan.name
        url, beat = storage or f"sqlite:///{here / 'study.db'}", max(1, min(10, grace // 4))
        facts = {"data": material.facts()}
        check_folder(here, plan, material.facts())
        known = finished_trials(here, plan, material.facts())
        with Store(url, plan, total, facts=facts, known=known, heartbeat=beat, grace=grace) as store:
            trainer = Trainer(
                plan,
                material,
                device,
                width,
                pruning,
                on_epoch=heard.epoch,
                checkpoints=here / "trials",
                trials=total,
            )
            try:
                work(store, trainer, heard)
            except (Interrupted, KeyboardInterrupt):
                _write(store, material, images, here)  # what there is so far can be looked at
                raise
            return _write(store, material, images, here)

    found = do(plan, trials, pruning or NEVER)
    final = final_plan(plan, found["trials"], trials, finalists) if finalists else None
    if final is None or final.shortlist is None:
        return found
    heard.final(final)
    return do(final, len(final.shortlist.finalists), NEVER)


def _images(material: SearchData) -> Images:
    return Images(len(material.data.validation), 0 if material.held_back is None else len(material.held_back))


def _write(store: Store, material: SearchData, images: Images, here: Path) -> dict[str, Any]:
    from stfseb.experiments.machine import code_version

    task, held = material.data.task, material.held_back
    said = (
        "no held-back context images: the training images serve as context"
        if held is None
        else f"held back from every trial: {len(held)} images of {held.name}"
    )
    listed = store.plan.shortlist
    made = [] if listed is None else [f"{listed.in_words} of {epochs(listed.epochs)}, study {listed.of}"]
    trials = store.trials()
    found = outcome_of(
        store.plan,
        trials,
        store.total,
        title=task.title,
        classes=task.classes,
        images=images,
        notes=[*made, *material.data.notes, said],
        more={"code": written_by(here, trials) or code_version(), "data": material.facts()},
    )
    write_search(here, found)
    return found


def work(
    store: Store,
    runner: Callable[[Iterable[Claim]], Iterator[tuple[Claim, dict[str, Any]]]],
    watcher: Watcher,
    *,
    poll: float = 0.5,
) -> None:
    """Do trials with `runner`, which turns claims into results, until none is left anywhere.

    Trials that an error or a signal interrupts are given back; those of a worker that was killed go to the next
    when its heartbeats have stopped for long enough.
    """
    watcher.start(store.trials(), store.total)
    mine: dict[int, Claim] = {}

    def supply() -> Iterator[Claim]:
        while (claim := store.claim()) is not None:
            mine[claim.id] = claim
            yield claim

    with store.alive():
        try:
            while len(trials := store.trials()) < store.total:
                claims = supply()  # taken one by one, as places become free
                first = next(claims, None)
                if first is None:
                    watcher.waiting(trials)
                    time.sleep(poll)
                    continue
                _compare_with(runner, trials)
                for claim, result in runner(chain([first], claims)):
                    store.finish(claim, result)
                    del mine[claim.id]
                    trials = store.trials()
                    _compare_with(runner, trials)
                    watcher.finished(claim, result, trials)
        finally:
            if mine:
                store.release(mine.values())


def _compare_with(runner: object, trials: list[Trial]) -> None:
    """Tell a trainer what all workers have reached, by which it sees what is hopeless."""
    if isinstance(runner, Trainer):
        runner.frontier = Frontier.of(trials)
