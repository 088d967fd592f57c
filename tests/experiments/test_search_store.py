"""One study, any number of workers: draws, exact counts, resuming, trials of the dead, and what can be wrong."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import Counter
from contextlib import ExitStack

import pytest
from search_helpers import plan, sleeper, trial

from stfseb.errors import StfsebError
from stfseb.experiments.search import make_plan
from stfseb.experiments.search.storage import open_url, shown_url
from stfseb.experiments.search.store import Store
from stfseb.experiments.search.worker import Watcher, work


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path / 'study.db'}"


@pytest.fixture
def stores():
    """Return a function that opens a store, to be closed when the test ends."""
    with ExitStack() as opened:
        yield lambda *args, **options: opened.enter_context(Store(*args, **options))


def result(nll=0.5, **more):
    return {name: value for name, value in trial(0, nll, **more).items() if name not in ("index", "params")}


def test_a_draw_follows_from_seed_and_number_alone():
    draws = plan().draws(30)
    assert plan().draws(7) == draws[:7]
    assert make_plan("mini", "stfseb", "extended", seed=1).draws(30) != draws
    choices = plan().choices
    assert all(params[name] in choices[name] for params in draws for name in choices)
    # They are optuna's random draws, spread over all values.
    many = plan().draws(400)
    for name, values in choices.items():
        counts = Counter(params[name] for params in many)
        assert set(counts) == set(values)
        assert max(counts.values()) < 3 * 400 / len(values)


def test_workers_get_the_draws_in_order_each_once(url, stores):
    one, two = stores(url, plan(), 6), stores(url, plan(), 6)
    claims = [store.claim() for store in (one, two, one, two, one, two)]
    assert [claim.index for claim in claims] == list(range(6))
    assert [claim.params for claim in claims] == plan().draws(6)
    assert one.claim() is two.claim() is None
    for claim in claims:
        assert one.finish(claim, result())
    assert [t["index"] for t in two.trials()] == list(range(6))


def test_resuming_goes_on_and_asking_for_more_adds_draws(url, stores):
    first = stores(url, plan(), 3)
    first.finish(first.claim(), result(0.1))
    again = stores(url, plan(), 5)
    assert [t["index"] for t in again.trials()] == [0]
    again.finish(again.claim(), result(0.2, outcome="pruned"))
    again.release([again.claim()])  # as Ctrl-C does
    assert again.claim().index == 2  # at once, and again first
    assert [again.claim().index for _ in range(2)] == [3, 4]
    assert stores(url, plan(), 5).trials()[1]["outcome"] == "pruned"
    fewer = stores(url, plan(), 1)
    assert fewer.claim() is None
    assert len(fewer.trials()) == 1


def test_a_silent_worker_s_trial_goes_to_another_with_the_same_settings(url, stores):
    dead, other = (stores(url, plan(), 2, heartbeat=1, grace=60) for _ in range(2))
    lost = dead.claim()
    assert other.claim().index == 1
    assert other.claim() is None
    other.storage.grace_period = 2  # not before: claims may take their time
    time.sleep(4.1)  # the storage counts whole seconds
    with other.alive():
        taken = other.claim()
        while taken.index != 0:  # the other's own first trial is silent too: it has just begun to beat
            taken = other.claim()
        assert taken.params == lost.params
        assert taken.id != lost.id
        assert not dead.finish(lost, result(9.0))  # it was not dead but slow: the other's result counts
        assert other.finish(taken, result(0.3))
    assert other.trials()[0]["nll"] == 0.3


def test_a_worker_that_beats_keeps_its_trial(url, stores):
    living, other = (stores(url, plan(), 1, heartbeat=1, grace=4) for _ in range(2))
    with living.alive():
        claim = living.claim()
        time.sleep(6.1)  # past the grace, of which three seconds are for a slow disk
        assert other.claim() is None
        assert living.finish(claim, result())


def test_a_trial_that_kills_every_worker_is_given_up_and_counted(url, stores):
    store = stores(url, plan(), 1, heartbeat=1, grace=2)
    for _ in range(4):
        store.storage.grace_period = -2  # everything is stale at once
        assert store.claim() is not None
    assert store.claim() is None
    (found,) = store.trials()
    assert found["outcome"] == "failed"
    assert found["reason"] == "4 workers died over it"


def test_diverged_trials_are_finished_with_their_reason(url, stores):
    store = stores(url, plan(), 2)
    bad = {"outcome": "diverged", "reason": "the data term became nan in epoch 2", "epochs": 1, "seconds": 1.0}
    store.finish(store.claim(), bad)
    store.finish(store.claim(), result())
    assert [t["outcome"] for t in store.trials()] == ["diverged", "complete"]
    assert store.left() == 0
    assert stores(url, plan(), 2).claim() is None  # not tried again


def test_repeated_draws_get_the_result_of_the_first(url, stores):
    few = make_plan("mini", "map", "paper")
    draws = few.draws(12)
    store = stores(url, few, 12)
    done = []
    while (claim := store.claim()) is not None:
        done.append(claim.index)
        store.finish(claim, result(claim.params["sigma"]))
    distinct = list({json.dumps(params): index for index, params in reversed(list(enumerate(draws)))}.values())
    assert sorted(done) == sorted(distinct)
    trials = store.trials()
    assert len(trials) == 12
    assert all(t["nll"] == t["params"]["sigma"] for t in trials)
    assert {t["index"] for t in trials if "same_as" not in t} == set(done)
    assert all(draws[t["same_as"]] == t["params"] for t in trials if "same_as" in t)


def test_threads_on_one_study_finish_exactly_what_was_asked(url, tmp_path, stores):
    log = tmp_path / "log"
    opened = [stores(url, plan(), 11) for _ in range(3)]
    threads = [threading.Thread(target=work, args=(s, sleeper(0.01, log), Watcher())) for s in opened]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(int, log.read_text().split())) == list(range(11))
    trials = opened[0].trials()
    assert [t["index"] for t in trials] == list(range(11))
    assert [t["params"] for t in trials] == plan().draws(11)


def test_an_error_gives_the_trials_back(url, stores):
    store = stores(url, plan(), 3)

    def broken(claims):
        list(itertools.islice(claims, 2))
        raise StfsebError("the disk is full")
        yield

    with pytest.raises(StfsebError, match="disk is full"):
        work(store, broken, Watcher())
    assert [stores(url, plan(), 3).claim().index for _ in range(1)] == [0]


def test_another_plan_or_other_data_do_not_join(url, stores):
    stores(url, plan(), 2, facts={"data": {"train": "aa", "context": "bb"}})
    with pytest.raises(StfsebError, match=r"begun with other train \(aa, now cc\)"):
        stores(url, plan(), 2, facts={"data": {"train": "cc", "context": "bb"}})


def test_names_tell_searches_apart():
    assert plan().name == "mini-stfseb-extended"
    names = {
        make_plan("mini", "stfseb", **options).name
        for options in ({}, {"seed": 1}, {"training": {"epochs": 2}}, {"context": "train"}, {"space": "extended"})
    }
    assert len(names) == 5


# What can be wrong ---------------------------------------------------------------------------------------


def test_urls():
    assert open_url("postgresql://me:x@host/db")[0] == "postgresql+psycopg://me:x@host/db"
    assert open_url("postgres://host/db")[0] == "postgresql+psycopg://host/db"
    assert shown_url("postgresql://me:se:cr@t@host:1/db") == "postgresql://me@host:1/db"
    for bad in ("study.db", "mysql://host/db", "sqlite://", "sqlite:///:memory:"):
        with pytest.raises(StfsebError, match="sqlite:///FILE or postgresql://"):
            open_url(bad)


def test_a_server_that_is_not_there_is_one_line_without_the_password():
    pytest.importorskip("psycopg")
    with pytest.raises(StfsebError) as caught:
        Store("postgresql://me:hunter2@127.0.0.1:9/db", plan(), 2)
    text = str(caught.value)
    assert "postgresql+psycopg://me@127.0.0.1:9/db cannot be used" in text
    assert "start the same command again" in text
    assert "hunter2" not in text
    assert "\n" not in text


def test_a_file_that_is_no_study_and_a_folder_that_cannot_be_made(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("not a database " * 100)
    with pytest.raises(StfsebError, match="cannot be used: file is not a database"):
        Store(f"sqlite:///{file}", plan(), 2)
    with pytest.raises(StfsebError, match="cannot write to"):
        Store(f"sqlite:///{file}/in/it.db", plan(), 2)


def test_no_trials():
    with pytest.raises(StfsebError, match="trials = 0 must be at least 1"):
        Store("sqlite:///never.db", plan(), 0)
