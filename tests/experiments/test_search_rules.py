"""The rules on trials made by hand, pruning, and the replay of a recorded search."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import pytest
from search_helpers import trial

from stfseb.experiments.search import Images, Pruning, choose, replay_pruning
from stfseb.experiments.search.pruning import NEVER, Frontier
from stfseb.experiments.search.rules import RULES

RECORDED = Path(__file__).parent / "recorded_search.json"
LONGER = Path(__file__).parents[2] / "results/searches/fmnist-stfseb-extended-f0e5fb50/search.json"


IMAGES = Images(validation=6000, held_back=1000)


def chosen(trials, rule, images=IMAGES):
    return choose(trials, rule, images).trial["index"]


def test_paper_takes_the_lowest_nll_as_trained():
    trials = [trial(0, 0.5, tempered=0.1), trial(1, 0.4, tempered=0.3), trial(2, 0.6, tempered=0.2)]
    assert chosen(trials, "paper") == 1


def test_ours_takes_the_best_detector_within_one_standard_error_after_a_temperature():
    trials = [
        trial(0, 0.30, tempered=0.250, se=0.02, auroc=0.80),
        trial(1, 0.90, tempered=0.269, se=0.50, auroc=0.95),  # its own standard error does not count
        trial(2, 0.90, tempered=0.271, se=0.50, auroc=0.99),  # just outside
        trial(3, 0.20, tempered=0.260, se=0.01, auroc=0.94),
    ]
    assert chosen(trials, "ours") == 1
    assert chosen(trials, "paper") == 3
    assert choose(trials, "ours").rests_on == {0, 1}  # without 0 the bound would move


def test_level_takes_the_lowest_nll_of_those_whose_auroc_the_images_cannot_tell_from_the_highest():
    trials = [
        trial(0, 0.30, tempered=0.190, se=0.008, auroc=0.99950),  # 0.00049 below, its standard error 0.00050
        trial(1, 0.31, tempered=0.195, se=0.008, auroc=0.99999),
        trial(2, 0.20, tempered=0.199, se=0.008, auroc=1.00000),  # outside
        trial(3, 0.31, tempered=0.189, se=0.008, auroc=0.99940),  # 0.00059 below, its standard error 0.00055
    ]
    assert chosen(trials, "ours") == 1
    choice = choose(trials, "level", IMAGES)
    assert choice.trial["index"] == 0
    assert choice.rests_on == {0, 1, 3}  # 3 sets the bound of the NLL, 1 that of the AUROC
    assert choice.why == (
        "lowest NLL at T of 2 whose AUROC plus its standard error reaches the highest, "
        "among 3 trials within 0.0080 of the lowest NLL at T 0.1890"
    )
    assert chosen(trials, "level", Images(6000, 100)) == 3  # fewer images tell less apart
    assert chosen(trials, "level", Images(6000, 10**6)) == 1


def test_draws_that_repeat_an_earlier_one_are_counted_once():
    trials = [trial(0, 0.3), trial(1, 0.301), trial(2, 0.3, same_as=0), trial(3, 0.3, same_as=0)]
    for rule in ("ours", "level"):
        assert "2 trials within" in choose(trials, rule, IMAGES).why


def test_level_needs_to_know_of_how_many_images_an_auroc_is():
    choice = choose([trial(0, 0.5)], "level")
    assert choice.trial is None
    assert "run the search again" in choice.why


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_ties_go_by_nll_and_then_by_number(order):
    trials = [trial(0, 0.30, auroc=0.9), trial(1, 0.295, auroc=0.9), trial(2, 0.295, auroc=0.9)]
    trials = [trials[i] for i in order]
    for rule in RULES:
        assert chosen(trials, rule) == 1


def test_one_trial_and_none():
    for rule in RULES:
        assert chosen([trial(0, 0.5)], rule) == 0
        nothing = choose([], rule)
        assert nothing.trial is None
        assert nothing.why == "no trial was trained to its end"


def test_without_held_back_images_the_lowest_nll_after_a_temperature_and_it_says_so():
    trials = [trial(0, 0.3, tempered=0.29, auroc=None), trial(1, 0.4, tempered=0.28, auroc=None)]
    assert choose(trials, "level", Images(300, 0)).trial["index"] == 1
    choice = choose(trials, "ours")
    assert choice.trial["index"] == 1
    assert "no held-back context images" in choice.why


def test_trials_that_did_not_end_are_never_chosen():
    bad = [trial(0, 0.01, outcome="pruned"), {"index": 1, "params": {}, "outcome": "diverged", "reason": "nan"}]
    for rule in RULES:
        assert chosen([*bad, trial(2, 0.9)], rule) == 2
        assert choose(bad, rule).trial is None


# Pruning -------------------------------------------------------------------------------------------------


def frontier(*curves):
    found = Frontier()
    for nll, accuracy in curves:
        found.add(nll, accuracy)
    return found


def test_the_frontier_is_the_best_so_far_of_all_trials():
    found = frontier(([2.0, 1.0, 1.5], [0.3, 0.6, 0.5]), ([1.8, 1.2, 0.9, 0.8], [0.2, 0.5, 0.7, 0.6]))
    assert [found.at(epoch) for epoch in (1, 2, 3, 4, 9)] == [
        (1.8, 0.3),
        (1.0, 0.6),
        (0.9, 0.7),
        (0.8, 0.7),
        (0.8, 0.7),
    ]
    assert Frontier().at(3) is None


def test_chance_for_three_epochs_is_hopeless_but_not_before_the_warm_up():
    chance = math.log(10)
    rule = Pruning(warmup=5)
    assert not rule.reason([chance] * 4, [0.1] * 4, Frontier(), 10)
    assert rule.reason([chance] * 5, [0.1] * 5, Frontier(), 10).startswith("collapsed")
    assert not rule.reason([chance] * 4 + [chance - 0.02], [0.1] * 5, Frontier(), 10)  # it has begun to learn
    assert not NEVER.reason([chance] * 50, [0.1] * 50, Frontier(), 10)


def test_behind_means_behind_in_both_so_that_a_temperature_can_still_mend_it():
    best = frontier(([0.4] * 6, [0.85] * 6))
    rule = Pruning(warmup=2, behind_after=5, nll_margin=0.3, accuracy_margin=0.15)
    assert not rule.reason([1.5] * 4, [0.5] * 4, best, 10)  # too early to say
    assert rule.reason([1.5] * 5, [0.5] * 5, best, 10).startswith("behind by 1.10 nats")
    assert not rule.reason([1.5] * 5, [0.82] * 5, best, 10)  # badly scaled, but it knows the classes
    assert not rule.reason([0.6] * 5, [0.5] * 5, best, 10)
    assert not rule.reason([1.5] * 5, [0.5] * 5, Frontier(), 10)  # nothing has finished


def search_of(*trials):
    return {"classes": 10, "trials": list(trials)}


def test_replay_counts_what_one_worker_would_have_saved():
    good = trial(0, 0.4, curve=[1.0, 0.6, 0.5, 0.45, 0.42, 0.41, 0.4], accuracy=[0.8] * 7)
    bad = trial(1, 1.9, curve=[2.2, 2.1, 2.0, 2.0, 1.9, 1.9, 1.9], accuracy=[0.3] * 7)
    rule = Pruning(behind_after=5)
    found = replay_pruning(search_of(good, bad), rule)
    assert (found.pruned, found.at_risk, found.safe, found.epochs, found.saved) == ([1], [1], True, 14, 2)
    # The other way round the bad one is over before the good one shows how bad it is, but it might not have been.
    swapped = [bad | {"index": 0}, good | {"index": 1}]
    found = replay_pruning(search_of(*swapped), rule)
    assert (found.pruned, found.at_risk, found.saved) == ([], [0], 0)


def test_replay_notices_when_the_trial_that_sets_the_bound_is_lost():
    late = trial(0, 0.2, tempered=0.2, auroc=0.6, curve=[2.2] * 11 + [0.2], accuracy=[0.1] * 11 + [0.9])
    early = trial(1, 0.3, tempered=0.205, auroc=0.9, curve=[0.5] * 11 + [0.3], accuracy=[0.8] * 12)
    assert choose([late, early], "ours").trial["index"] == 1
    found = replay_pruning(search_of(late, early))
    assert found.at_risk == [0]
    assert found.lost == ["paper", "ours"]


@pytest.fixture(scope="module")
def recorded():
    return json.loads(RECORDED.read_text())


@pytest.mark.parametrize("rule", [Pruning(), Pruning(behind_after=5)])  # it is eight epochs long
def test_on_a_recorded_search_no_winner_is_pruned(recorded, rule):
    assert recorded["counts"]["pruned"] == 0  # it was recorded without pruning
    assert len(recorded["trials"]) >= 24
    found = replay_pruning(recorded, rule)
    assert found.safe, found
    assert found.pruned, "a search without a hopeless trial shows nothing"
    assert found.saved >= len(found.pruned)
    # The choices on what is left are those of the record.
    left = [t for t in recorded["trials"] if t["index"] not in found.at_risk]
    for name, choice in recorded["choices"].items():
        assert chosen(left, name) == choice["trial"]


def test_on_a_longer_search_no_winner_is_pruned():
    """Fashion-MNIST, 40 trials of up to 30 epochs, one of which had collapsed."""
    found = replay_pruning(json.loads(LONGER.read_text()))
    assert found.safe, found
    assert len(found.pruned) >= 4
    assert found.saved >= 20 * len(found.pruned)


@pytest.mark.parametrize(
    "eager",
    [
        Pruning(warmup=1, behind_after=1, nll_margin=0.0, accuracy_margin=-1.0),  # whoever is not first at every epoch
        Pruning(warmup=1, collapse_epochs=1, collapse_margin=2.2),  # whoever has not learned much at once
    ],
)
def test_the_replay_catches_a_rule_that_is_too_eager(recorded, eager):
    assert replay_pruning(recorded, eager).lost


def test_the_replay_catches_a_winner_that_starts_late(recorded):
    late = copy.deepcopy(recorded)
    best = next(t for t in late["trials"] if t["index"] == late["choices"]["paper"]["trial"])
    curve = best["history"]["nll"]
    best["history"]["nll"] = [math.log(10)] * (len(curve) - 1) + [min(curve)]
    assert "paper" in replay_pruning(late).lost


def test_progress_names_the_best_of_every_rule():
    from rich.console import Console

    from stfseb.experiments.search.progress import SearchProgress
    from stfseb.experiments.search.store import Claim

    progress = SearchProgress(Console(), show=False)
    progress.start([], 4)
    trials = [trial(0, 0.30, auroc=0.8), trial(1, 0.305, auroc=0.9)]
    line = progress.line(Claim(1, {"tau2": 1.0, "kernel": "rbf"}, 1, 1), trials[1], trials)
    assert line.startswith("2/4 · #1 tau2=1 kernel=rbf: complete, NLL 0.3050, at T=1.00 0.3050, AUROC 90.0 %, 2 epochs")
    assert "best so far: ours #1 (NLL 0.3050" in line
    assert "paper #0 (NLL 0.3000" in line
    assert "level" not in line  # of how many images the AUROCs are is not known
    progress.images = Images(1000, 1000)
    known = progress.line(Claim(1, {}, 1, 1), trials[1], trials)
    assert "best so far: level and ours #1 (NLL 0.3050" in known
    progress.images = Images(10, 10)  # so few that 0.9 is level with 0.8
    known = progress.line(Claim(1, {}, 1, 1), trials[1], trials)
    assert "best so far: level and paper #0 (NLL 0.3000" in known
    assert ", ours #1 (NLL 0.3050" in known
    assert line.endswith(" left")
    both = progress.line(Claim(0, {}, 0, 0), trials[0], trials[:1])
    assert "best so far: #0 by all rules (NLL 0.3000" in both
    lost = {"index": 2, "params": {}, "outcome": "diverged", "reason": "nan", "epochs": 0, "seconds": 0.0}
    assert "diverged, nan, 0 epochs, 0 s · pruned 0 · best so far: none" in progress.line(
        Claim(2, {}, 2, 2), lost, [lost]
    )


def test_waiting_for_other_workers_is_said_once_of_one_trial_and_of_more(capsys):
    from rich.console import Console

    from stfseb.experiments.search.progress import SearchProgress

    for total, said in (
        (2, "1 trial is with other workers, or was with"),
        (4, "3 trials are with other workers, or were"),
    ):
        progress = SearchProgress(Console(force_terminal=False, width=200))
        progress.start([], total)
        progress.waiting([trial(0, 0.3)])
        progress.waiting([trial(0, 0.3)])
        printed = capsys.readouterr().out
        assert printed.startswith(said)
        assert printed.count("waiting") == 1
        assert "--grace" in printed  # for how long, at most


def test_long_trials_are_heard_of_in_a_log(capsys, monkeypatch):
    from rich.console import Console

    from stfseb.experiments.search import progress as module
    from stfseb.experiments.search.store import Claim

    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    progress = module.SearchProgress(Console(force_terminal=False, width=200))
    progress.start([], 2)
    first, second = Claim(0, {}, 0, 0), Claim(1, {}, 1, 1)
    for seconds, claim, epochs in ((10, first, 1), (29, second, 1), (31, first, 2), (40, first, 3)):
        now[0] = float(seconds)
        progress.epoch(claim, [{"validation_nll": 1.0 / n} for n in range(1, epochs + 1)])
    assert capsys.readouterr().out.splitlines() == ["under way: #0 epoch 2 NLL 0.500 · #1 epoch 1 NLL 1.000"]
    now[0] = 50.0
    progress.finished(first, trial(0, 0.3), [trial(0, 0.3)])
    now[0] = 79.0  # a finished trial's line was news too
    progress.epoch(second, [{"validation_nll": 1.0}])
    assert "under way" not in capsys.readouterr().out
    now[0] = 81.0
    progress.epoch(second, [{"validation_nll": 1.0}])
    assert capsys.readouterr().out == "under way: #1 epoch 1 NLL 1.000\n"
