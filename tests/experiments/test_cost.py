"""The simulated scheduler against graphs whose makespans are worked out by hand, and the model against real plans."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from stfseb.errors import StfsebError
from stfseb.experiments import cost
from stfseb.experiments.cost import CostModel, at_speeds, by_task_and_method, paper_phases, search_phase
from stfseb.experiments.executors import Outcome
from stfseb.experiments.executors.local import _Pool
from stfseb.experiments.jobs import make_job
from stfseb.experiments.paper import carry_out as carrying
from stfseb.experiments.paper.plan import ALL, Asked, make_plan
from stfseb.experiments.simulate import Phase, Run, chunk_size, simulate, to_set_up

if TYPE_CHECKING:
    from pathlib import Path

ASKED = Asked(tasks=("mnist", "pathmnist"), seeds=(0, 1))


def phase(*numbers: int, seconds: float = 10.0, set_up: float = 0.0, **more: Any) -> Phase:
    """Groups of so many equal runs, each group a kind of its own."""
    groups = {f"g{i}": [Run(seconds, set_up, f"k{i}")] * n for i, n in enumerate(numbers)}
    return Phase("p", groups, **more)


@pytest.mark.parametrize(
    ("numbers", "cards", "makespan"),
    [
        ((7,), 1, 70),  # a card is shared, not multiplied
        ((6,), 2, 30),  # threes
        ((4,), 2, 30),  # three and one
        ((1, 1, 1), 2, 20),  # groups are not mixed in a chunk
        ((2, 2, 2), 3, 20),
        ((9,), 64, 30),
        ((3, 9), 64, 30),
        ((30,), 2, 150),  # chunks 7 5 4 3 3 3 3 2: one card ends at 70 100 130 150, the other at 50 90 120 150
    ],
)
def test_runs_take_what_a_pencil_says(numbers: tuple[int, ...], cards: int, makespan: float) -> None:
    found = simulate([phase(*numbers)], cards, start=0.0)
    assert found.makespan == pytest.approx(makespan)
    assert found.work == 10 * sum(numbers)
    assert found.efficiency == pytest.approx(found.work / cards / makespan)


def test_set_up_is_paid_for_every_place_of_every_chunk() -> None:
    thirty = phase(30, set_up=5.0)  # on one card: chunks of 24 and 6, three places each
    assert simulate([thirty], 1, start=0).makespan == 300 + 2 * 15
    assert simulate([thirty], 1, start=0, again=0).makespan == 300 + 15
    assert simulate([thirty], 1, start=0, again=0.5).makespan == 300 + 15 + 7.5
    assert simulate([thirty], 1, start=4).makespan == 330 + 4  # one process
    two = simulate([phase(6, set_up=5.0)], 2, start=4)
    assert (two.makespan, two.set_up, two.start) == (4 + 15 + 30, 30, 8)
    assert simulate([phase(2, set_up=5.0)], 1, start=0).set_up == 10  # two runs take two places
    alone = Phase("p", {"g": [Run(10.0, 5.0)] * 3}, width=1, alone=True)
    assert simulate([alone], 8, start=4).makespan == 4 + 3 * 15


def test_a_place_goes_on_with_its_step_only_for_the_same_kind() -> None:
    a, b = Run(1, 1, "a"), Run(1, 1, "b")
    assert to_set_up([a] * 9, [], 3) == [a] * 3
    assert to_set_up([a, a, a, b, a, a], [], 3) == [a, a, a, b]
    assert to_set_up([a, a, a, b, b, b, a, a, a], [], 3) == [a] * 3 + [b] * 3 + [a] * 3  # dropped for b
    places = ["a", "a", "b"]
    assert to_set_up([b, b, b], places, 3) == [b, b]
    assert places == ["b"] * 3
    c = Run(1, 1, "c")
    assert to_set_up([c, b, a], ["a", "b", "b"], 3) == [c, a]  # a's step is the oldest and makes room for c's


def test_the_next_phase_waits_for_all_of_the_last() -> None:
    uneven = phase(3, 1)  # two cards: 30 and 10
    found = simulate([uneven, Phase("q", {"g": [Run(7.0)]})], 2, start=0)
    assert found.ends == {"p": 30, "q": 37}
    assert found.longest == {"p": 30, "q": 7}


def test_a_search_sets_up_once_a_card_and_cards_spread_over_searches() -> None:
    assert simulate([phase(6, set_up=5.0, claims=True)], 1, start=1).makespan == 1 + 15 + 60
    assert simulate([phase(3, 3, set_up=5.0, claims=True)], 2, start=1).makespan == 1 + 15 + 30
    assert simulate([phase(3, 3, set_up=5.0, claims=True)], 1, start=1).makespan == 2 * (1 + 15 + 30)
    groups = {"big": [Run(10.0)] * 9, "small": [Run(12.0)] * 3}
    found = simulate([Phase("s", groups, claims=True)], 2, start=0)
    assert found.makespan == 66  # the second card has 36 s of the small one, then 30 s of the big one
    groups = {"big": [Run(5.0, 5.0)] * 3 + [Run(12.0, 5.0)] * 3, "small": [Run(10.0, 5.0)] * 3}
    found = simulate([Phase("s", groups, claims=True)], 2, start=0)
    assert (found.makespan, found.set_up) == (66, 30)  # 36 s are left of the big one, but for two cards


@pytest.mark.parametrize("claims", [False, True])
def test_no_schedule_is_better_than_possible_or_worse_than_a_list(claims: bool) -> None:
    draw = random.Random(0)
    for _ in range(30):
        groups = {
            f"g{i}": [Run(draw.uniform(1, 50), draw.uniform(0, 20), str(draw.randint(0, 2))) for _ in range(n)]
            for i, n in enumerate(draw.choices(range(1, 40), k=5))
        }
        cards = draw.choice((1, 2, 8, 9, 64))
        found = simulate([Phase("p", groups, claims=claims)], cards)
        spent = found.work + found.set_up + found.start
        assert found.work == pytest.approx(sum(run.seconds for runs in groups.values() for run in runs))
        assert max(spent / cards, found.longest["p"]) - 1e-6 <= found.makespan
        assert found.makespan <= spent / cards + found.longest["p"] + 1e-6  # Graham's bound


@pytest.mark.parametrize("waiting", [1, 5, 40, 100, 1000])
def test_chunks_are_those_of_the_pool(waiting: int) -> None:
    pool = _Pool(SimpleNamespace(waiting=range(waiting)), ["cuda:0"] * 8, None, 3)  # type: ignore[arg-type]
    assert chunk_size(waiting, 8, 3) == pool._size()


def test_an_epoch_is_scaled_by_images_pixels_and_context() -> None:
    model = CostModel()
    assert model.epoch("mnist", "stfseb") == model.epoch("fmnist", "stfseb") == 0.218
    assert model.epoch("pathmnist", "mfvi") == pytest.approx(0.845 * 89_996 / 45_000 * 784 / 1024)
    assert model.epoch("organamnist", "map") == pytest.approx(0.096 * 34_561 / 54_000)
    assert model.epoch("cifar10", "stfseb", 128) == pytest.approx(0.499 * 256 / 160)
    assert model.epoch("cifar10", "mcdropout", 128) == 0.421  # has no context
    with pytest.raises(StfsebError, match="ensemble"):
        model.epoch("mnist", "ensemble")
    with pytest.raises(StfsebError, match="mini"):
        model.epoch("mini", "stfseb")


def test_a_run_is_its_epochs_and_its_predictions() -> None:
    model = CostModel(epochs=40, overhead=1.5)
    job = make_job("cifar10", "mcdropout")
    bare = model.run(job)
    assert bare.seconds == pytest.approx(40 * 0.421 * 1.5 + 0.187 * (10_000 + 26_032) / 10_000)
    assert model.run(job, ("rotation",)).seconds - bare.seconds == pytest.approx(13 * 0.187)
    assert model.run(make_job("cifar10", "mcdropout", training={"epochs": 4})).epochs == 4
    by_training_images = model.run(make_job("mnist", "stfseb", context="train"))
    assert by_training_images.seconds == model.run(make_job("mnist", "stfseb")).seconds


def test_kinds_are_by_what_is_built_into_a_step() -> None:
    kinds = [
        cost._kind(make_job("mnist", "stfseb", seed, settings=settings))
        for seed, settings in [(0, {}), (1, {"dof": 3.0}), (0, {"dof": float("inf")}), (0, {"num_context": 64})]
    ]
    assert kinds[0] == kinds[1]
    assert len(set(kinds)) == 3


def test_phases_are_the_batches_that_are_carried_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for: list[tuple[set[str], tuple[str, ...], int]] = []

    def note(jobs: list[Any], results: Path, *, parts: tuple[str, ...], alone: bool, **_: Any) -> Outcome:
        kinds = {f"{job.task} {job.method}" for job in jobs}
        asked_for.append((kinds, parts, len({job.name for job in jobs}), 1 if alone else 3))
        return Outcome()

    monkeypatch.setattr(carrying, "run_jobs", note)
    monkeypatch.setattr(carrying, "not_on_disk", lambda *_: None)
    carrying.carry_out([make_plan(what, ASKED) for what in ALL], tmp_path, announce=lambda _: None)
    phases = [p for p in paper_phases(CostModel(), tmp_path, ASKED) if p.name.startswith("paper")]
    assert len(phases) == len(asked_for)
    for found, (kinds, parts, number, width) in zip(phases, asked_for, strict=True):
        assert {" ".join(name.split()[:2]) for name in found.groups} == kinds
        assert sum(map(len, found.groups.values())) == number
        assert found.width == width
        assert all(part in found.name for part in parts)


def test_retuning_comes_last_and_its_runs_are_new(tmp_path: Path) -> None:
    phases = paper_phases(CostModel(), tmp_path, ASKED)
    names = [p.name for p in phases]
    assert names.index("dof grid") < min(i for i, name in enumerate(names) if name.startswith("dof retuned"))
    runs = dict.fromkeys(("dof grid", "dof retuned"), 0)
    for found in phases:
        for name in runs:
            if found.name.startswith(name):
                runs[name] += sum(map(len, found.groups.values()))
    # Two tasks, six dofs. Four tau2 a dof are not the dof table's; of the chosen ones the first seed is the grid's.
    assert runs == {"dof grid": 2 * 6 * 4, "dof retuned": 2 * 6 * 1}


def test_searches_train_no_draw_twice() -> None:
    found = search_phase(CostModel(trial_epochs=10), 300)
    numbers = {name: len(runs) for name, runs in found.groups.items()}
    assert len(numbers) == 30
    assert numbers["mnist map"] == 5  # the printed grid has no more
    assert numbers["mnist gfsvi"] <= 60
    assert 250 < numbers["mnist stfseb"] <= 300
    assert len({run.kind for run in found.groups["mnist gfsvi"]}) == 4  # kernels
    assert len({run.kind for run in found.groups["mnist stfseb"]}) == 1
    speeds = {task: dict.fromkeys(cost.METHODS, 2.0) for task in cost.TASKS}
    assert at_speeds([found], speeds) == pytest.approx(2.0 * 10 * sum(numbers.values()))
    assert by_task_and_method([found])["mnist", "map"] == (5, pytest.approx(5 * 10 * 0.096 * cost.POPULATION))
