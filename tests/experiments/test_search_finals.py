"""Finals: the short list, a final as a study of its own, both stages killed and resumed, and what a person sees."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import yaml
from search_helpers import tiny_task, trial
from typer.testing import CliRunner

from repository_scripts import ROOT, script
from stfseb import cli
from stfseb.data.tasks import load_task
from stfseb.errors import StfsebError
from stfseb.experiments.search import Images, Pruning, make_plan, read_search, search, worker
from stfseb.experiments.search.finals import final_plan, rank_correlation, short_list, standings
from stfseb.experiments.search.outcome import finished_trials
from stfseb.experiments.search.pruning import NEVER
from stfseb.experiments.search.store import Store
from stfseb.experiments.search.trials import search_data
from stfseb.experiments.search.worker import Watcher
from stfseb.report.search import ranks_in_words, search_in_words
from stfseb.report.searches import search_command, search_grid, trials_in_words
from stfseb.training.interrupts import Interrupted

RECORDED = sorted(f for f in ROOT.glob("results/searches/*/search.json") if "-final" not in f.parent.name)


# The short list ------------------------------------------------------------------------------------------


def test_the_short_list_goes_by_nll_after_a_temperature_repeats_once_ties_by_number():
    trials = [
        trial(0, 0.1, tempered=0.50),
        trial(1, 0.9, tempered=0.20, auroc=0.7),
        trial(2, 0.9, tempered=0.30),
        trial(3, 0.9, tempered=0.20, params={"tau2": 1.0}, same_as=1),
        trial(4, 0.0, tempered=0.01, outcome="pruned"),
        {"index": 5, "params": {"tau2": 5.0}, "outcome": "diverged", "reason": "nan"},
        trial(6, 0.9, tempered=0.30),
        trial(7, 0.9, tempered=0.40),
    ]
    for order in (trials, trials[::-1]):
        assert [one["trial"] for one in short_list(order, 4)] == [1, 2, 6, 7]
    assert [one["trial"] for one in short_list(trials, 9)] == [1, 2, 6, 7, 0]  # what there is
    assert short_list(trials, 1) == (
        {"trial": 1, "params": {"tau2": 1.0}, "nll": 0.9, "tempered_nll": 0.2, "tempered_auroc": 0.7},
    )
    assert short_list(trials[4:6], 3) == ()


def test_half_of_the_short_list_has_the_lowest_nll_the_rest_is_beaten_by_no_one_in_nll_and_auroc():
    figures = [(0.50, 0.9), (0.51, 0.8), (0.52, 0.7), (0.53, 0.6), (0.54, 0.95), (0.6, 0.99), (0.7, 0.98), (0.8, 0.92)]
    trials = [trial(i, 0.9, tempered=nll, auroc=auroc) for i, (nll, auroc) in enumerate(figures)]
    beaten = {
        i: sum(n < nll and a > auroc for n, a in figures)  # by how many in both
        for i, (nll, auroc) in enumerate(figures)
    }
    assert [i for i, others in beaten.items() if others == 0] == [0, 4, 5]  # the first front
    for order in (trials, trials[::-1]):
        assert [one["trial"] for one in short_list(order, 5)] == [0, 1, 2, 4, 5]
        assert [one["trial"] for one in short_list(order, 6)] == [0, 1, 2, 4, 5, 6]  # of the second, 1, 6: the next
        assert [one["trial"] for one in short_list(order, 3)] == [0, 1, 4]
        assert [one["trial"] for one in short_list(order, 2)] == [0, 4]
        assert [one["trial"] for one in short_list(order, 99)] == list(range(8))
    for one in trials:
        one["metrics"]["tempered_auroc"] = None
    assert [one["trial"] for one in short_list(trials, 5)] == [0, 1, 2, 3, 4]


def test_what_our_rule_chooses_among_the_short_trials_is_a_finalist():
    """A front may be longer than its places, and the rule's choice the last of it."""
    figures = [(0.500 + i / 1000, 0.7 + i / 100) for i in range(9)] + [(0.7, 0.99)]
    trials = [trial(i, 0.9, tempered=nll, auroc=auroc, se=0.0081) for i, (nll, auroc) in enumerate(figures)]
    assert [one["trial"] for one in short_list(trials, 5)] == [0, 1, 2, 3, 8]
    assert [one["trial"] for one in short_list(trials, 2)] == [0, 8]
    assert [one["trial"] for one in short_list(trials, 1)] == [0]


def test_what_is_at_chance_is_a_finalist_only_where_there_is_no_other():
    """Outputs that are the same for every image have any AUROC; `mini` has ten classes, log 10 is 2.303."""
    figures = [(1.0, 0.7), (1.1, 0.6), (1.2, 0.5), (2.28, 0.4), (2.295, 0.99), (2.303, 0.98)]
    plan = make_plan("mini", "stfseb", "extended", training={"epochs": 2})
    trials = [
        trial(i, 2.4, tempered=nll, auroc=auroc, params=params)
        for i, ((nll, auroc), params) in enumerate(zip(figures, plan.draws(6), strict=True))
    ]

    def finalists(count):
        return [one["trial"] for one in final_plan(plan, trials, 6, count).shortlist.finalists]

    assert [finalists(count) for count in (2, 4, 5, 6)] == [[0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]]
    assert [one["trial"] for one in short_list(trials, 2)] == [0, 4]  # where chance is not known


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.parent.name)
def test_finalists_of_recorded_searches_hold_the_presets(file):
    found = read_search(file)
    chosen = next(t for t in found["trials"] if t["index"] == found["choices"]["ours"]["trial"])
    for count in (2, 3, 5):
        listed = [one["params"] for one in short_list(found["trials"], count)]
        assert len(listed) == count
        assert chosen["params"] in listed


def test_a_final_trains_as_the_task_does_and_in_nothing_else_differently():
    plan = make_plan("mini", "stfseb", "extended", seed=3, training={"epochs": 2}, context="train")
    trials = [trial(i, 1.0 - i / 10, params=params) for i, params in enumerate(plan.draws(6))]
    final = final_plan(plan, trials, 6, 2)
    assert final.name == f"{plan.name}-final2of6"
    assert final.draws(2) == [plan.draws(6)[5], plan.draws(6)[4]]
    assert final.training == dict(load_task("mini").training)
    assert replace(final, training=plan.training, shortlist=None) == plan
    assert final.job(final.draws(1)[0]).seed == 0
    assert json.loads(json.dumps(final.identity)) == final.identity
    assert [one["trial"] for one in final.identity["shortlist"]["finalists"]] == [5, 4]
    assert final.identity["shortlist"].items() >= {"of": plan.name, "trials": 6, "epochs": 2, "asked": 2}.items()
    assert final_plan(plan, trials, 6, 3).name != final.name
    with pytest.raises(StfsebError, match="has 2 finalists, not 3"):
        final.draws(3)


def test_another_short_list_does_not_join(tmp_path):
    plan = make_plan("mini", "stfseb", "extended", training={"epochs": 2})
    draws = plan.draws(3)
    one = final_plan(plan, [trial(i, 0.5 + i, params=p) for i, p in enumerate(draws)], 3, 2)
    other = final_plan(plan, [trial(i, 0.5 - i, params=p) for i, p in enumerate(draws)], 3, 2)
    assert one.name == other.name
    with Store(f"sqlite:///{tmp_path / 'study.db'}", one, 2) as store:
        assert [store.claim().params for _ in range(2)] == draws[:2]
    with pytest.raises(StfsebError, match=f"the study {one.name} was begun with other finalists"):
        Store(f"sqlite:///{tmp_path / 'study.db'}", other, 2)


# Searches that were made before there were finals --------------------------------------------------------


def test_names_of_searches_are_what_they_were():
    assert make_plan("cifar10", "stfseb", "extended", training={"epochs": 10}).name == (
        "cifar10-stfseb-extended-37a8b37f"
    )
    assert make_plan("cifar10", "stfseb", "extended").name == "cifar10-stfseb-extended"
    assert "shortlist" not in make_plan("mini", "map").identity


def test_a_search_with_copies_of_the_context_has_a_name_of_its_own():
    plan = make_plan("cifar10", "stfseb", "extended", training={"epochs": 10})
    names = {replace(plan, base={**plan.base, "context_copies": n}).name for n in (0, 1, 4)}
    assert plan.name in names
    assert len(names) == 3
    four = make_plan("cifar10", "stfseb", "extended", training={"epochs": 10}, settings={"context_copies": 4})
    assert four.name in names - {plan.name}
    whole = make_plan("cifar10", "stfseb", "extended")
    assert replace(whole, base={**whole.base, "context_copies": 4}).name.startswith(f"{whole.name}-")


def test_settings_that_are_not_searched_may_be_given_and_are_part_of_the_name():
    plain = make_plan("mini", "stfseb")
    same = [make_plan("mini", "stfseb", settings=s) for s in ({}, {"num_context": 32.0}, {"context_copies": 0})]
    assert [(one.name, one.base) for one in same] == [(plain.name, plain.base)] * 3
    other = {make_plan("mini", "stfseb", settings={"num_context": n}).name for n in (64, 128)}
    assert len(other | {plain.name}) == 3
    assert make_plan("mini", "stfseb", settings={"num_context": 64}).job({"tau2": 1.0}).settings["num_context"] == 64
    # Where the preset has copies a search without them is the search of before there were any.
    assert make_plan("fmnist", "fseb", "extended", settings={"context_copies": 0}).name == "fmnist-fseb-extended"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sigma": 3.0}, "sigma is searched here (1e-06, 1e-05, 0.0001, 0.001, 0.01, 0.1, 1, 10): leave it out"),
        ({"contexts": 3}, "unknown setting 'contexts'"),
    ],
)
def test_settings_that_a_search_cannot_have(settings, message):
    with pytest.raises(StfsebError, match=re.escape(message)):
        make_plan("mini", "stfseb", settings=settings)


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.parent.name)
def test_recorded_searches_are_of_the_plans_of_today(file, tmp_path):
    found = read_search(file)
    said = found["plan"]
    length = {"epochs": said["training"]["epochs"]}
    options = {"seed": said["seed"], "training": length, "context": said["context"]}
    if "num_context" in said["base"]:
        options["settings"] = {"context_copies": said["base"].get("context_copies", 0)}
    plan = make_plan(said["task"], said["method"], said["space"], **options)
    today = dict(plan.identity)
    if "temperature" not in said:  # of single samples: what it was measured with is not what trials are compared by now
        assert today.pop("temperature") == "average"
        assert today == said
        assert plan.name != found["study"]
        assert finished_trials(file.parent, plan, found["data"]) == []
        return
    assert today == said
    assert plan.name == found["study"] == file.parent.name
    # Their studies are not kept: the trials go into a new one as they ended, and none is trained again.
    with Store(f"sqlite:///{tmp_path / 'study.db'}", plan, found["asked"], known=found["trials"]) as store:
        assert store.trials() == found["trials"]
        assert store.claim() is None


def test_the_table_of_searches_says_which_temperature_they_had():
    older = [read_search(file) for file in RECORDED if "temperature" not in read_search(file)["plan"]][:2]
    newer = {**older[0], "study": "newer", "plan": {**older[0]["plan"], "temperature": "average"}}
    words = "Made when T divided the outputs of every sample, before they are averaged"

    def said(found):
        return [note for note in search_grid(found).notes if note.startswith(words)]

    assert said(older) == [f"{words}."]
    assert said([*older, newer]) == [f"{words} ({older[0]['study']}, {older[1]['study']})."]
    assert said([newer]) == []


# Both stages, with a trainer that makes up its figures ---------------------------------------------------


class Made:
    """In place of a trainer. The larger tau2 is, the better a short trial and the worse a long one."""

    log: list
    stop = None  # (epochs, after how many)
    pruning: list
    fate = staticmethod(lambda epochs, params: "complete")
    seconds = 0.0

    def __init__(self, plan, material, device, width, pruning, **_):
        self.epochs = plan.training["epochs"]
        self.pruning.append(pruning)

    def __call__(self, claims):
        for claim in claims:
            if self.stop is not None and self.stop == (self.epochs, sum(e == self.epochs for e, *_ in self.log)):
                type(self).stop = None
                raise Interrupted(15, "in epoch 1", "kept")
            begun = time.monotonic()
            time.sleep(self.seconds)
            self.log.append((self.epochs, _place(claim.params), begun, time.monotonic()))
            outcome = self.fate(self.epochs, claim.params)
            place = _place(claim.params)
            nll = 2.0 - place if self.epochs == 1 else 0.5 + place / 10
            found = trial(0, nll, se=0.0, outcome=outcome, curve=[nll] * self.epochs)
            if outcome != "complete":
                del found["metrics"]
            yield claim, {name: value for name, value in found.items() if name not in ("index", "params")}


def _place(params):
    return sum(place * 7.0**-i for i, place in enumerate(sorted(float(str(v)) for v in params.values()))) % 1.0


@pytest.fixture(scope="module")
def material():
    return search_data(load_task("mini").load())


@pytest.fixture
def made(monkeypatch, material):
    class Fresh(Made):
        log, pruning = [], []

    monkeypatch.setattr(worker, "Trainer", Fresh)
    monkeypatch.setattr(worker, "search_data", lambda data: material)
    return Fresh


@pytest.fixture
def plan():
    return make_plan("mini", "stfseb", "extended", training={"epochs": 1})


def test_both_rules_choose_among_the_finalists_by_what_they_reached_in_full(made, plan, tmp_path):
    found = search(plan, 8, tmp_path, finalists=3, pruning=Pruning())
    places = [_place(params) for params in plan.draws(8)]
    best = sorted(range(8), key=lambda i: -places[i])[:3]
    assert found["study"] == f"{plan.name}-final3of8"
    assert [one["trial"] for one in found["plan"]["shortlist"]["finalists"]] == best
    assert [t["params"] for t in found["trials"]] == [plan.draws(8)[i] for i in best]
    assert [t["metrics"]["tempered_nll"] for t in found["trials"]] == [0.5 + places[i] / 10 for i in best]
    assert found["choices"]["paper"]["trial"] == found["choices"]["ours"]["trial"] == 2  # the last of the short list
    assert found["choices"]["ours"]["settings"] == {"num_context": 32, **plan.draws(8)[best[2]]}
    assert found["asked"] == 3
    assert [len(t["history"]["nll"]) for t in found["trials"]] == [15] * 3
    assert made.pruning == [Pruning(), NEVER]
    first = read_search(tmp_path / "searches" / plan.name)
    assert first["choices"]["paper"]["trial"] == best[0]
    assert read_search(tmp_path / "searches" / found["study"]) == found
    assert [(s.trial, s.rank_before, s.rank_after) for s in standings(found)] == [
        (best[2], 3, 1),
        (best[1], 2, 2),
        (best[0], 1, 3),
    ]
    assert standings(first) == []


def test_another_number_of_finalists_or_trials_is_another_final_that_trains_what_is_new(made, plan, tmp_path):
    three = search(plan, 8, tmp_path, finalists=3)
    five = search(plan, 8, tmp_path, finalists=5)
    assert [folder.name for folder in sorted((tmp_path / "searches").iterdir())] == [
        plan.name,
        f"{plan.name}-final3of8",
        f"{plan.name}-final5of8",
    ]
    assert five["trials"][:3] == three["trials"]
    assert [t["index"] for t in five["trials"]] == list(range(5))
    assert Counter(epochs for epochs, *_ in made.log) == {1: 8, 15: 5}
    # Of more trials others are finalists, and old ones have other numbers.
    wider = search(plan, 12, tmp_path, finalists=3)
    best = sorted(plan.draws(12), key=lambda params: -_place(params))[:3]
    old = [t["params"] for t in five["trials"]]
    assert [t["params"] for t in wider["trials"]] == best
    assert [t["nll"] for t in wider["trials"]] == [0.5 + _place(params) / 10 for params in best]
    assert 0 < sum(params in old for params in best) < 3
    assert Counter(epochs for epochs, *_ in made.log) == {1: 12, 15: 5 + sum(params not in old for params in best)}


class StopsBeforeTheFinal(Watcher):
    def final(self, plan):
        raise Interrupted(2, "between trials", "kept")


def test_what_was_trained_before_a_stop_is_not_trained_again(made, plan, tmp_path):
    made.stop = (1, 2)  # in the first stage
    with pytest.raises(Interrupted):
        search(plan, 5, tmp_path, finalists=2)
    assert [epochs for epochs, *_ in made.log] == [1, 1]
    with pytest.raises(Interrupted):  # between the stages
        search(plan, 5, tmp_path, finalists=2, watcher=StopsBeforeTheFinal())
    assert [epochs for epochs, *_ in made.log] == [1] * 5
    made.stop = (15, 1)  # in the second
    with pytest.raises(Interrupted):
        search(plan, 5, tmp_path, finalists=2)
    half = read_search(tmp_path / "searches" / f"{plan.name}-final2of5")
    assert (len(half["trials"]), half["asked"]) == (1, 2)
    assert ranks_in_words(half)[-1].endswith("-> not finished")
    found = search(plan, 5, tmp_path, finalists=2)
    assert [epochs for epochs, *_ in made.log] == [1] * 5 + [15] * 2
    assert len({(epochs, place) for epochs, place, *_ in made.log}) == 7
    assert search(plan, 5, tmp_path, finalists=2) == found
    assert len(made.log) == 7


def plan_before(found):
    """The plan of a search of the time when its temperature was of single samples."""
    return {name: value for name, value in found["plan"].items() if name != "temperature"}


def test_a_search_goes_on_from_its_search_json_where_the_study_is_not_kept(made, plan, tmp_path):
    found = search(plan, 4, tmp_path, finalists=2)
    for study in tmp_path.rglob("study.db*"):
        study.unlink()
    assert search(plan, 4, tmp_path, finalists=2) == found
    assert len(made.log) == 4 + 2
    # One of other images is another search, and is not written over.
    file = tmp_path / "searches" / plan.name / "search.json"
    for study in tmp_path.rglob("study.db*"):
        study.unlink()
    first = read_search(file)
    for other, said in (({"data": {"train": "other"}}, "context"), ({"plan": plan_before(first)}, "temperature")):
        kept = json.dumps(first | other)
        file.write_text(kept)
        with pytest.raises(StfsebError, match=rf"holds a search with other {said} \(.* move it away, or give another"):
            search(plan, 4, tmp_path)
        assert file.read_text() == kept
    file.unlink()
    search(plan, 4, tmp_path)
    assert len(made.log) == 4 + 2 + 4


def test_a_final_of_another_short_list_is_not_written_over(made, plan, material, tmp_path):
    found = search(plan, 4, tmp_path, finalists=2)
    assert found["images"] == {"validation": len(material.data.validation), "held_back": len(material.held_back)}
    assert len(material.data.validation) != len(material.held_back)
    file = tmp_path / "searches" / found["study"] / "search.json"
    other = {**found["trials"][1], "params": {**found["trials"][1]["params"], "sigma": 123.0}}
    file.write_text(json.dumps(found | {"trials": [found["trials"][0], other]}))
    for study in file.parent.glob("study.db*"):
        study.unlink()
    with pytest.raises(StfsebError, match="holds the final of another short list: move it away"):
        search(plan, 4, tmp_path, finalists=2)


def test_a_search_that_is_taken_over_names_the_code_that_made_it_and_loses_no_trial(made, plan, tmp_path):
    found = search(plan, 4, tmp_path)
    file, earlier = tmp_path / "searches" / plan.name / "search.json", {"version": "0.0.1", "commit": "earlier"}
    assert found["code"] != earlier
    file.write_text(json.dumps(found | {"code": earlier}))
    for study in tmp_path.rglob("study.db*"):
        study.unlink()
    assert search(plan, 4, tmp_path) == read_search(file) == found | {"code": earlier}
    assert search(plan, 5, tmp_path)["code"] == found["code"]  # one is of the present code
    for study in tmp_path.rglob("study.db*"):
        study.unlink()
    assert len(search(plan, 2, tmp_path)["trials"]) == 2  # fewer than the file has: the study keeps the others
    assert search(plan, 5, tmp_path)["trials"][:4] == found["trials"]
    assert len(made.log) == 5


def test_a_finalist_that_was_given_up_in_another_final_is_tried_again(made, plan, tmp_path):
    first = search(plan, 4, tmp_path, finalists=2)
    file = tmp_path / "searches" / first["study"] / "search.json"
    lost = {"index": 0, "params": first["trials"][0]["params"], "outcome": "failed", "reason": "4 workers died over it"}
    file.write_text(json.dumps(first | {"trials": [lost, first["trials"][1]]}))
    more = search(plan, 4, tmp_path, finalists=3)
    assert [t["outcome"] for t in more["trials"]] == ["complete"] * 3
    assert Counter(epochs for epochs, *_ in made.log) == {1: 4, 15: 2 + 2}


def test_several_workers_wait_for_each_other_before_the_final(made, plan, tmp_path):
    made.seconds = 0.2
    found = []
    todo = {"plan": plan, "trials": 5, "folder": tmp_path, "finalists": 3}
    threads = [threading.Thread(target=lambda: found.append(search(**todo))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert found[0] == found[1] == found[2]
    assert len(made.log) == 5 + 3
    assert set(Counter((epochs, place) for epochs, place, *_ in made.log).values()) == {1}
    last_trial = max(end for epochs, _, _, end in made.log if epochs == 1)
    assert all(begun >= last_trial for epochs, _, begun, _ in made.log if epochs == 15)


def test_the_trial_of_a_worker_that_died_comes_back_before_the_final(made, material, plan, tmp_path):
    url = f"sqlite:///{tmp_path / 'searches' / plan.name / 'study.db'}"
    with Store(url, plan, 3, facts={"data": material.facts()}, heartbeat=1, grace=2) as dead:
        lost = dead.claim()  # and never a sign of life again
        found = search(plan, 3, tmp_path, finalists=1, grace=2)
    assert len(made.log) == 3 + 1
    best = max(plan.draws(3), key=_place)
    assert found["trials"][0]["params"] == best
    assert any(place == _place(lost.params) for epochs, place, *_ in made.log if epochs == 1)


def test_fewer_finalists_than_asked_are_said_and_none_is_the_first_stage_s_outcome(made, plan, tmp_path):
    good = [_place(params) for params in plan.draws(4)][1]
    made.fate = staticmethod(lambda epochs, params: "complete" if _place(params) == good else "diverged")
    heard = []

    class Hears(Watcher):
        def final(self, plan):
            heard.append(plan.shortlist.in_words)

    found = search(plan, 4, tmp_path, finalists=3, watcher=Hears())
    said = "1 finalist of 4 trials (3 were asked for: no more settings were trained to their end)"
    assert heard == [said]
    assert found["notes"][0] == f"{said} of 1 epoch, study {plan.name}"
    assert found["study"] == f"{plan.name}-final3of4"
    assert found["choices"]["ours"]["trial"] == 0

    made.fate = staticmethod(lambda epochs, params: "diverged")
    found = search(plan, 4, tmp_path / "none", finalists=3)
    assert found["study"] == plan.name
    assert found["choices"]["ours"] == {"trial": None, "why": "no trial was trained to its end"}
    assert [folder.name for folder in (tmp_path / "none" / "searches").iterdir()] == [plan.name]


def test_a_finalist_that_diverges_is_kept_and_not_chosen(made, plan, tmp_path):
    worst = sorted(_place(params) for params in plan.draws(6))[1]  # which would have won in full
    made.fate = staticmethod(
        lambda epochs, params: "diverged" if (epochs, _place(params)) == (15, worst) else "complete"
    )
    found = search(plan, 6, tmp_path, finalists=5)
    assert found["counts"]["diverged"] == 1
    assert found["trials"][4]["outcome"] == "diverged"
    assert found["choices"]["paper"]["trial"] == 3
    assert [s.index for s in standings(found)] == [3, 2, 1, 0, 4]
    assert ranks_in_words(found)[-1].endswith("-> diverged")  # four that ended: too few for a correlation
    assert "rank 5 -> none" in ranks_in_words(found)[-1]


@pytest.mark.parametrize(
    ("finalists", "message"),
    [
        (-1, "--finalists -1: give how many of the best trials, or 0 for no final"),
        (5, "--finalists 5: no more than --trials 4 can be taken; lower it or raise --trials"),
    ],
)
def test_finalists_that_cannot_be(made, plan, tmp_path, finalists, message):
    with pytest.raises(StfsebError, match=re.escape(message)):
        search(plan, 4, tmp_path, finalists=finalists)
    assert made.log == []
    assert list(tmp_path.iterdir()) == []


# What is shown -------------------------------------------------------------------------------------------


def recorded_final(order=(3, 1, 0, 2, 5, 4), lost=()):
    """Return a final of six finalists that end in this order, made of a recorded search."""
    first = json.loads((ROOT / "results/searches/fmnist-stfseb-extended-c70fbbe1/search.json").read_text())
    first = {**first, "asked": 40, "trials": first["trials"][:40]}  # of its 300
    plan = make_plan("fmnist", "stfseb", "extended", training={"epochs": 10})
    final = final_plan(plan, first["trials"], 40, 6)
    trials = []
    for index, params in enumerate(final.draws(6)):
        one = trial(index, 0.3 + 0.001 * order.index(index), params=params, curve=[0.5] * 40)
        trials.append(one | ({"outcome": "diverged"} if index in lost else {}))
    about = {"title": "Fashion-MNIST", "classes": 10, "images": Images(6000, 1000), "notes": [], "more": {}}
    made = worker.outcome_of(final, trials, 6, **about)
    return json.loads(json.dumps(made)), first


@pytest.mark.parametrize(
    ("order", "lost"), [((3, 1, 0, 2, 5, 4), ()), ((5, 4, 3, 2, 1, 0), (2,)), ((0, 1, 2, 3, 4, 5), ())]
)
def test_ranks_before_and_after_and_their_correlation(order, lost):
    found, first = recorded_final(order, lost)
    by_number = {t["index"]: t for t in first["trials"]}
    whole = [by_number[one["trial"]] for one in found["plan"]["shortlist"]["finalists"]]
    ended = [index for index in order if index not in lost]
    lines = ranks_in_words(found)
    assert len(lines) == 7
    for place, (line, index) in enumerate(zip(lines, ended, strict=False), 1):
        before, after = whole[index]["metrics"]["tempered_nll"], found["trials"][index]["nll"]
        assert line == (
            f"finalist {index} (trial {whole[index]['index']}): rank {index + 1} -> {place}, "
            f"NLL at T {before:.4f} after 10 epochs -> {after:.4f} after 40 epochs"
        )
    wanted = np.corrcoef(np.argsort(np.argsort(ended)), range(len(ended)))[0, 1]  # of the ranks among those that ended
    assert rank_correlation(found) == pytest.approx(wanted)
    assert lines[-1] == f"Spearman's correlation of the two ranks: {wanted:.2f}"
    four, _ = recorded_final(order, (0, 1))
    assert rank_correlation(four) is None
    assert ranks_in_words(first) == []


def test_tables_and_words_tell_a_final_from_a_search():
    found, first = recorded_final()
    command = "stfseb search fmnist --method stfseb --trials 40 --space extended --epochs 10"
    assert search_command(first) == command
    assert search_command(found) == f"{command} --finalists 6"
    assert trials_in_words(found) == "6 finalists of 40 trials of 10 epochs (6 complete)"
    assert search_in_words(found)[0] == "6 finalists finished (6 complete), 6 s of training."
    grid = search_grid([found, first])
    assert [row[0].text for row in grid.cells] == ["40"] * 3 + ["6"]  # a choice a row; the final below
    assert grid.cells[3][0].below == ("finalists of 40 trials", "extended grid", "100 epochs", "4 context copies")
    plain = json.loads((ROOT / "results/searches/fmnist-stfseb-extended-37a8b37f/search.json").read_text())
    assert search_command(plain) == f"{command} --set context_copies=0"
    assert search_grid([plain]).cells[0][0].below == ("extended grid", "10 epochs")
    trials = found["plan"]["shortlist"]["finalists"]
    assert grid.cells[3][1].text == f"finalist 3 (trial {trials[3]['trial']})"


# As a person runs it -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return str(tiny_task(tmp_path_factory.mktemp("task"), train=96, validation=64, context=80, epochs=3))


def test_a_search_with_finalists_from_the_command_to_the_files_and_again(task, stfseb, tmp_path):
    out = tmp_path / "out"
    words = ["search", task, "--trials", 4, "--space", "extended", "--epochs", 1, "--finalists", 2, "--out", out]
    code, said, err = stfseb(*words, "--device", "cpu")
    assert code == 0, err
    first, final = sorted((out / "searches").iterdir())
    assert final.name == f"{first.name}-final2of4"
    files = "search.json, preset.yaml, search.png, search.pdf"
    assert f"Written to {final}: {files}\n" in said
    assert f"The 4 trials that the finalists are from, in {first}: {files}\n" in said
    lines = err.splitlines()
    assert lines[4] == "2 finalists of 4 trials, now trained to the task's 3 epochs"
    assert [line.partition(" ")[0] for line in lines] == ["1/4", "2/4", "3/4", "4/4", "2", "1/2", "2/2"]
    assert "…" not in said
    assert said.count("after 1 epoch -> ") == 2

    trials, finals = read_search(first), read_search(final)
    assert trials["asked"] == 4
    assert {t["epochs"] for t in trials["trials"]} == {1}
    assert {t["epochs"] for t in finals["trials"]} == {3}
    assert finals["plan"]["training"] == trials["plan"]["training"] | {"epochs": 3}
    whole = sorted(trials["trials"], key=lambda t: t["metrics"]["tempered_nll"])[:2]
    assert [t["params"] for t in finals["trials"]] == [t["params"] for t in whole]
    # The same seed and images: after one epoch a finalist is where its trial was.
    assert [t["history"]["nll"][0] for t in finals["trials"]] == [t["history"]["nll"][0] for t in whole]
    lowest = min(finals["trials"], key=lambda t: t["nll"])
    text = (final / "preset.yaml").read_text()
    assert text.startswith("# Found among 2 finalists of 4 trials of stfseb on tiny")
    assert yaml.safe_load(text)["paper"]["presets"]["stfseb"] == {"num_context": 32, **lowest["params"]}

    code, again, err = stfseb(*words, "--device", "cpu")  # nothing is trained twice
    assert code == 0
    assert again == said
    assert err.splitlines() == [
        "4 of 4 trials are finished already; no trial is left to train (a larger --trials adds draws)",
        "2 finalists of 4 trials, now trained to the task's 3 epochs",
        "2 of 2 finalists are finished already; no finalist is left to train (a larger --finalists takes more)",
    ]
    code, shown, _ = stfseb("search", "--show", final)
    assert code == 0
    assert shown == said[: said.index("Written to")]

    # What else reads searches takes it for one.
    runner = CliRunner()
    assert f"search {final.name}: 2 of 2 finalists" in runner.invoke(cli.app, ["status", str(out)]).output
    assert runner.invoke(cli.app, ["report", str(out)]).exit_code == 0
    page = (out / "report.html").read_text("utf-8")
    assert "2 finalists of 4 trials of 1 epoch (2 complete)" in page
    assert "Short trials and full training" in page
    assert (out / "plots" / f"search-{final.name}.png").exists()
    assert script("add_results").add(out, tmp_path / "kept").startswith("2 of 2 runs and searches are new")
    assert read_search(tmp_path / "kept" / "searches" / final.name) == finals


def test_a_signal_while_a_trial_is_written_down_stops_the_search(task, stfseb, tmp_path, monkeypatch):
    """It comes where errors of a database are waited out, and is none of them."""
    real, sent = Store._write, []

    def write(store, *what):
        if not sent:
            sent.append(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
        real(store, *what)

    monkeypatch.setattr(Store, "_write", write)
    words = ["search", task, "--trials", 3, "--epochs", 1, "--device", "cpu", "--out", tmp_path]
    code, _, err = stfseb(*words)
    assert code == 143, err
    last = "stfseb: stopped by SIGTERM between trials: what is finished is kept; the same command goes on from there"
    assert err.splitlines()[-1] == last
    (half,) = (tmp_path / "searches").iterdir()
    assert read_search(half)["trials"] == []
    code, _, err = stfseb(*words)
    assert code == 0, err
    assert len(read_search(half)["trials"]) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--finalists", -1, "--epochs", 1], "--finalists -1: give how many of the best trials, or 0 for no final"),
        (["--finalists", 9, "--epochs", 1], "--finalists 9: no more than --trials 4 can be taken"),
        (["--finalists", 2], "--finalists 2: trials of 3 epochs are no shorter than the task's own 3; give --epochs"),
        (["--finalists", 2, "--epochs", 7], "trials of 7 epochs are no shorter than the task's own 3; give --epochs"),
    ],
)
def test_wrong_finalists_are_one_line_with_the_remedy(task, stfseb, tmp_path, words, message):
    code, out, err = stfseb("search", task, "--trials", 4, "--out", tmp_path, *words)
    assert code == 2
    assert not out
    assert message in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
