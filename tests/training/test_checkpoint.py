"""A run that is taken up from its checkpoint ends as if it had never stopped: every method, at any step."""

import json
import math
import random
import struct

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from stfseb import FSEB, GFSVI, MAP, MFVI, STFSEB, Ensemble, MCDropout, OutlierExposure, SmallCNN, StfsebError, fit
from stfseb.data.augmentation import flip_and_crop
from stfseb.training import checkpoint
from stfseb.training.loop import Training
from stfseb.training.population import Member, fit_population


class Stop(Exception):
    """Stands for a crash: nothing in `fit` knows it."""


@pytest.fixture(scope="module")
def data():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(90, 6, generator=g)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    return (x[:70], y[:70]), (x[70:], y[70:])


@pytest.fixture(scope="module")
def context():
    return torch.randn(50, 6, generator=torch.Generator().manual_seed(2)) * 3


def make_net(rate=0.5, norm=False):
    layers = [nn.Linear(6, 16), *([nn.BatchNorm1d(16)] if norm else []), nn.ReLU(), nn.Dropout(rate), nn.Linear(16, 3)]
    return nn.Sequential(*layers)


MAKERS = {
    "stfseb": lambda c: STFSEB(make_net(), c, num_context=8, samples=2),
    "stfseb, independent extractor": lambda c: STFSEB(make_net(), c, num_context=8, samples=2, extractor="independent"),
    "stfseb, rows of the minibatch": lambda c: STFSEB(make_net(), "train", num_context=4, samples=2),
    "stfseb, batch norm": lambda c: STFSEB(make_net(norm=True), c, num_context=8, samples=2),
    "fseb": lambda c: FSEB(make_net(), c, num_context=8, samples=2),
    "gfsvi": lambda c: GFSVI(make_net(), c, num_context=8, samples=2, kernel_steps=5, kernel_batch=32, cache=False),
    "gfsvi, subset": lambda c: GFSVI(
        make_net(), c, num_context=4, samples=2, kernel_steps=5, cache=False, linearise="subset", subset_classes=2
    ),
    "mcdropout": lambda c: MCDropout(make_net(), samples=2),
    "mfvi": lambda c: MFVI(make_net(), samples=2),
    "map": lambda c: MAP(make_net()),
    "outlier exposure": lambda c: OutlierExposure(make_net(), c, num_context=8, samples=2),
    "ensemble": lambda c: Ensemble.of(lambda i: STFSEB(make_net(), c, num_context=8, samples=2), 2),
}
SETTINGS = {"epochs": 5, "batch_size": 16, "lr": 2e-2, "patience": 3, "progress": False, "seed": 4}


def make(name, context):
    torch.manual_seed(7)
    return MAKERS[name](context)


def crash_after(method, steps):
    """Let the method raise in the objective of step `steps` + 1, as a bug or a dying machine might."""
    inner, made = method.objective, [0]

    def objective(*arguments):
        made[0] += 1
        if made[0] > steps:
            raise Stop
        return inner(*arguments)

    method.objective = objective
    return method


def assert_same(a, b):
    """Weights, buffers, held-out scores and history are equal to the last bit; seconds are not compared."""
    (one, first), (two, second) = a, b
    for (name, p), q in zip(one.state_dict().items(), two.state_dict().values(), strict=True):
        assert torch.equal(p, q), name
    assert one.calibration == two.calibration
    assert one.provenance == two.provenance

    def plain(result):
        return [{k: v for k, v in entry.items() if k != "seconds"} for entry in result.history]

    assert plain(first) == plain(second)
    assert (first.best_epoch, first.best_validation_nll) == (second.best_epoch, second.best_validation_nll)
    assert first.stopped == second.stopped


@pytest.mark.parametrize("name", list(MAKERS))
def test_every_method_goes_on_to_the_same_model(name, data, context, tmp_path):
    """Crashes in the first epoch, between two steps of the third, and right after the fourth: the same end."""
    whole = make(name, context)
    expected = fit(whole, *data, **SETTINGS)
    file = tmp_path / "run.checkpoint"
    for steps in (2, 8, 5, 3):  # of five an epoch
        with pytest.raises(Stop):
            fit(crash_after(make(name, context), steps), *data, **SETTINGS, checkpoint=file, checkpoint_every=0)
        assert file.exists()
    resumed = make(name, context)
    assert_same((whole, expected), (resumed, fit(resumed, *data, **SETTINGS, checkpoint=file)))
    again = make(name, context)  # a finished run is returned as it is
    crash_after(again, 0)
    assert_same((whole, expected), (again, fit(again, *data, **SETTINGS, checkpoint=file)))


@pytest.mark.parametrize("steps", range(0, 25, 4))
def test_epoch_by_epoch_without_a_stated_interval(steps, data, context, tmp_path):
    whole = make("stfseb", context)
    expected = fit(whole, *data, **SETTINGS)
    file = tmp_path / "run"
    with pytest.raises(Stop):
        fit(crash_after(make("stfseb", context), steps), *data, **SETTINGS, checkpoint=file)
    resumed = make("stfseb", context)
    assert_same((whole, expected), (resumed, fit(resumed, *data, **SETTINGS, checkpoint=file)))


class Noisy(Dataset):
    """A user's data set that draws from every global source of random numbers."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        noise = random.gauss(0, 0.1) + np.random.normal(0, 0.1) + 0.1 * torch.randn(())  # noqa: NPY002
        return self.x[i] + float(noise), self.y[i]


@pytest.mark.parametrize("own", [False, True])
def test_loaders_and_their_random_sources_go_on(own, data, tmp_path):
    train, validation = data

    def loader():
        generator = torch.Generator().manual_seed(5) if own else None
        return DataLoader(Noisy(*train), batch_size=16, shuffle=True, generator=generator)

    def seeded():
        random.seed(3)
        np.random.seed(3)  # noqa: NPY002
        return make("mcdropout", None)

    whole = seeded()
    expected = fit(whole, loader(), validation, **SETTINGS)
    file = tmp_path / "run"
    for steps in (7, 6):
        method = crash_after(seeded(), steps)
        with pytest.raises(Stop):
            fit(method, loader(), validation, **SETTINGS, checkpoint=file, checkpoint_every=0)
    resumed = seeded()
    assert_same(
        (whole, expected),
        (resumed, fit(resumed, loader(), validation, **SETTINGS, checkpoint=file, checkpoint_every=0)),
    )


def test_convolutions_that_lie_channels_last_go_on(mini, tmp_path):
    """Fused Adam walks through weights and moments side by side in memory: they must lie alike."""
    images, held_out = mini("train", 96), mini("validation", 20)

    def run(steps=None, **more):
        torch.manual_seed(0)
        net = SmallCNN(hidden=16).to(memory_format=torch.channels_last)
        method = STFSEB(net, mini("kmnist", 40).images, num_context=8, samples=2)
        settings = {"epochs": 2, "batch_size": 32, "progress": False, "augment": flip_and_crop, **more}
        return method, fit(method if steps is None else crash_after(method, steps), images, held_out, **settings)

    expected = run()
    with pytest.raises(Stop):
        run(4, checkpoint=tmp_path / "run", checkpoint_every=0)
    assert_same(expected, run(checkpoint=tmp_path / "run"))


def test_augmentation_goes_on(data, tmp_path):
    def jitter(x):
        return x + 0.1 * torch.randn_like(x)

    whole = make("map", None)
    expected = fit(whole, *data, **SETTINGS, augment=jitter)
    with pytest.raises(Stop):
        fit(
            crash_after(make("map", None), 8),
            *data,
            **SETTINGS,
            augment=jitter,
            checkpoint=tmp_path / "run",
            checkpoint_every=0,
        )
    resumed = make("map", None)
    found = fit(resumed, *data, **SETTINGS, augment=jitter, checkpoint=tmp_path / "run")
    assert_same((whole, expected), (resumed, found))


def test_it_is_said_and_the_callback_sees_new_epochs_only(data, context, tmp_path, capsys, caplog):
    with pytest.raises(Stop):
        fit(crash_after(make("map", context), 12), *data, **SETTINGS, checkpoint=tmp_path / "run", checkpoint_every=0)
    seen = []
    caplog.set_level("INFO", "stfseb")
    settings = {**SETTINGS, "progress": True}
    result = fit(make("map", context), *data, **settings, checkpoint=tmp_path / "run", callback=seen.append)
    assert [e["epoch"] for e in seen] == [3, 4, 5]
    assert [e["epoch"] for e in result.history] == [1, 2, 3, 4, 5]
    assert "resumed at epoch 3, step 3" in caplog.text
    assert "MAP: resumed at epoch 3, step 3" in capsys.readouterr().err


OTHERS = {
    "lr": ({"lr": 1e-3}, "protocol lr is 0.02 there and 0.001 here"),
    "seed": ({"seed": 5}, "protocol seed is 4 there and 5 here"),
    "batch size": ({"batch_size": 8}, "batch_size"),
    "epochs": ({"epochs": 9}, "protocol epochs"),
    "augment": ({"augment": lambda x: x}, "augment"),
}


@pytest.mark.parametrize("case", [*OTHERS, "method", "settings", "data", "context", "initial weights", "network"])
def test_a_checkpoint_of_another_run_is_refused_in_one_line(case, data, context, tmp_path):
    file = tmp_path / "run"
    fit(make("stfseb", context), *data, **SETTINGS, checkpoint=file)
    before = file.read_bytes()
    changes, match = OTHERS.get(case, ({}, case))
    method, train = make("stfseb", context), data
    if case == "method":
        method, match = make("map", context), "method is stfseb there and map here"
    elif case == "settings":
        torch.manual_seed(7)
        method, match = STFSEB(make_net(), context, dof=7.0, num_context=8, samples=2), "settings dof is 5.0 there"
    elif case == "data":
        train, match = ((data[0][0] + 1e-3, data[0][1]), data[1]), "train is"
    elif case == "context":
        method = make("stfseb", context + 1)
    elif case == "initial weights":
        torch.manual_seed(8)
        method, match = MAKERS["stfseb"](context), "torch.manual_seed"
    elif case == "network":
        torch.manual_seed(7)
        net = nn.Sequential(nn.Linear(6, 17), nn.ReLU(), nn.Dropout(0.5), nn.Linear(17, 3))
        method = STFSEB(net, context, num_context=8, samples=2)
    with pytest.raises(StfsebError, match="is of another run") as caught:
        fit(method, *train, **{**SETTINGS, **changes}, checkpoint=file)
    assert match in str(caught.value)
    assert "\n" not in str(caught.value)
    assert file.read_bytes() == before


@pytest.mark.parametrize("name", ["stfseb", "fseb", "map", "mfvi"])
def test_a_checkpoint_from_before_a_setting_was_there_goes_on_at_its_default(name, data, context, tmp_path):
    file = tmp_path / "run"
    first = fit(make(name, context), *data, **SETTINGS, checkpoint=file)
    tensors, state = checkpoint.read(file)
    for setting in ("context_copies", "learn", "vectorise"):
        state["identity"]["settings"].pop(setting, None)
    checkpoint.write(file, tensors, state)
    assert fit(make(name, context), *data, **SETTINGS, checkpoint=file).best_epoch == first.best_epoch
    del state["identity"]["settings"]["sigma"]
    state["identity"]["settings"]["gone"] = 3
    checkpoint.write(file, tensors, state)
    with pytest.raises(StfsebError, match="settings gone is 3 there and None here"):
        fit(make(name, context), *data, **SETTINGS, checkpoint=file)


def test_damage_is_told_apart(data, context, tmp_path):
    """A cut file, another byte in a tensor, a file of something else, a newer format."""
    file = tmp_path / "run"
    fit(make("map", context), *data, **SETTINGS, checkpoint=file)
    good = file.read_bytes()
    flipped = bytearray(good)
    flipped[-300] ^= 1
    newer = good.replace(b'\\"format\\": 1,', b'\\"format\\": 9,')
    assert newer != good
    for content, match in (
        (good[:-10], "cannot be read"),
        (b"", "cannot be read"),
        (b"not a checkpoint at all", "cannot be read"),
        (bytes(flipped), "checksum"),
        (newer, "upgrade"),
    ):
        file.write_bytes(content)
        with pytest.raises(StfsebError, match=match) as caught:
            fit(make("map", context), *data, **SETTINGS, checkpoint=file)
        assert "\n" not in str(caught.value)
    with pytest.raises(StfsebError, match="is a folder"):
        fit(make("map", context), *data, **SETTINGS, checkpoint=tmp_path)


def test_the_file_is_safetensors_with_json_and_keeps_odd_numbers(tmp_path):
    tensors = {
        "a": torch.arange(3.0),
        "b": torch.tensor(2, dtype=torch.int64),
        "c": torch.ones(2, dtype=torch.bfloat16),
    }
    state = {"best": math.inf, "history": [{"accuracy": math.nan, "nll": 0.1 + 0.2}], "text": "x"}
    checkpoint.write(tmp_path / "file", tensors, state)
    content = (tmp_path / "file").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])  # the format's own words: a length, then JSON
    header = json.loads(content[8 : 8 + length])
    json.loads(header["__metadata__"]["stfseb checkpoint"], parse_constant=lambda word: pytest.fail(word))
    read, found = checkpoint.read(tmp_path / "file")
    assert all(torch.equal(read[name], tensors[name]) and read[name].dtype == tensors[name].dtype for name in tensors)
    assert found["best"] == math.inf
    assert math.isnan(found["history"][0]["accuracy"])
    assert found["history"][0]["nll"] == 0.1 + 0.2
    assert checkpoint.read(tmp_path / "none") is None


def test_tied_weights_and_regression(data, tmp_path):
    from stfseb.likelihoods import GaussianRegression

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.out(torch.relu(self.b(torch.relu(self.a(x)))))

    def run(steps=None, **settings):
        torch.manual_seed(0)
        method = MAP(Tied(), likelihood=GaussianRegression())
        targets = [(x, x[:, :1]) for x, _ in data]
        if steps is not None:
            with pytest.raises(Stop):
                fit(crash_after(method, steps), *targets, **SETTINGS, **settings, checkpoint_every=0)
            return None
        return method, fit(method, *targets, **SETTINGS, **settings)

    expected = run()
    run(8, checkpoint=tmp_path / "run")
    method, result = run(checkpoint=tmp_path / "run")
    assert method.net.a.weight is method.net.b.weight
    assert all(torch.equal(p, q) for p, q in zip(expected[0].parameters(), method.parameters(), strict=True))
    assert result.best_validation_nll == expected[1].best_validation_nll


def test_state_that_no_checkpoint_can_hold_is_named_before_training(data, tmp_path):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"any": "thing"}

        def set_extra_state(self, state):
            pass

    with pytest.raises(StfsebError, match="tensors only"):
        fit(MAP(nn.Sequential(Extra(6, 3))), *data, **SETTINGS, checkpoint=tmp_path / "run")


def test_a_population_goes_on(data, context, tmp_path):
    """Each member has its own file; finished ones are not trained again, pruned ones stay pruned."""
    train, validation = data
    settings = {k: v for k, v in SETTINGS.items() if k not in ("progress", "seed")}

    def members(crash=None):
        def maker(i):
            method = make("stfseb", context)
            return crash_after(method, crash[i]) if crash and i in crash else method

        return [Member(str(i), lambda i=i: maker(i), i, tmp_path / f"{i}.checkpoint") for i in range(3)]

    def prune(member, history):
        return member.name == "2" and len(history) == 2

    plain = [Member(m.name, m.make, m.seed) for m in members()]
    expected = {o.member.name: o for o in fit_population(plain, train, validation, prune=prune, **settings)}
    with pytest.raises(Stop):
        list(fit_population(members({1: 12}), train, validation, prune=prune, checkpoint_every=0, **settings))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0.checkpoint", "1.checkpoint"]
    for crash in (None, {0: 0, 1: 0, 2: 0}):  # the second time nothing is left to train
        found = {o.member.name: o for o in fit_population(members(crash), train, validation, prune=prune, **settings)}
        assert set(found) == set(expected)
        for name, outcome in found.items():
            other = expected[name]
            assert_same((other.method, other.result), (outcome.method, outcome.result))
    assert found["2"].result.stopped == "pruned"


def test_epochs_that_cost_less_than_a_checkpoint_are_not_all_written(data, context, tmp_path, monkeypatch):
    """By default writing takes about a fiftieth of the time at most; the end is written in any case."""
    import time

    from stfseb.training import resuming

    written = []
    inner = checkpoint.write

    def slow(path, tensors, state):
        time.sleep(0.02)
        written.append(state["epoch"])
        inner(path, tensors, state)

    monkeypatch.setattr(resuming.checkpoint, "write", slow)
    fit(make("map", context), *data, **{**SETTINGS, "epochs": 30, "patience": 30}, checkpoint=tmp_path / "run")
    assert written[0] == 1
    assert written[-1] == 30
    assert len(written) < 10


def test_seconds_add_up_over_starts(data, context, tmp_path):
    with pytest.raises(Stop):
        fit(crash_after(make("map", context), 8), *data, **SETTINGS, checkpoint=tmp_path / "run", checkpoint_every=0)
    tensors, state = checkpoint.read(tmp_path / "run")
    state["seconds"] += 100.0
    checkpoint.write(tmp_path / "run", tensors, state)
    assert fit(make("map", context), *data, **SETTINGS, checkpoint=tmp_path / "run").seconds > 100


def test_the_optimiser_state_is_written_in_place_where_a_graph_holds_its_address(data, context, tmp_path):
    """As captured steps need it: the same tensors, other numbers."""
    from stfseb.training import resuming
    from stfseb.training.batches import ResidentBatches
    from stfseb.training.loop import Protocol

    def training():
        batches = [ResidentBatches(*part, 16, 4, torch.device("cpu")) for part in data]
        return Training(make("stfseb", context), *batches, Protocol(epochs=5, lr=2e-2, seed=4))

    with torch.random.fork_rng(devices=[]):
        first = training()
        first.begin(1)
        first.finish(1)
        kept = resuming.snapshot(first)
        kept = ({name: value.clone() for name, value in kept[0].items()}, kept[1])
        second = training()
        for number in (1, 2):
            second.begin(number)
            second.finish(number)
        held = [v for state in second.optimiser.state.values() for v in state.values()]
        held += list(second.method.parameters())
        addresses = [v.data_ptr() for v in held]
        resuming.restore(second, *kept)
        assert [v.data_ptr() for v in held] == addresses
        for run in (first, second):
            run.begin(2)
            run.finish(2)
    assert all(torch.equal(p, q) for p, q in zip(first.method.parameters(), second.method.parameters(), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("capture", [True, False])
def test_on_a_card_runs_go_on_at_epochs(capture, tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from stfseb import SmallCNN

    g = torch.Generator().manual_seed(0)
    images = (
        torch.randint(255, (300, 1, 28, 28), generator=g, dtype=torch.uint8),
        torch.randint(10, (300,), generator=g),
    )

    def run(crash=None, **more):
        torch.manual_seed(0)
        method = STFSEB(SmallCNN(), 255 - images[0], samples=3)

        def stop(entry):
            if entry["epoch"] == crash:
                raise Stop

        settings = {"epochs": 6, "batch_size": 64, "device": "cuda", "precision": "float32", "compiled": False}
        return fit(method, images, images, **settings, capture=capture, progress=False, callback=stop, **more)

    expected = run()
    with pytest.raises(Stop):
        run(crash=4, checkpoint=tmp_path / "run", checkpoint_every=0)
    found = run(checkpoint=tmp_path / "run")
    for one, two in zip(expected.history, found.history, strict=True):
        assert two["data"] == pytest.approx(one["data"], rel=2e-3)
        assert two["function"] == pytest.approx(one["function"], rel=2e-3)


@pytest.mark.gpu
def test_a_run_in_a_captured_step_of_another_is_still_itself(tmp_path):
    """The second run of a place takes the first one's captured step over; alone, it goes on from its checkpoint."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from stfseb import SmallCNN

    g = torch.Generator().manual_seed(0)
    images = (
        torch.randint(255, (300, 1, 28, 28), generator=g, dtype=torch.uint8),
        torch.randint(10, (300,), generator=g),
    )

    def member(i):
        def made():
            torch.manual_seed(i)
            return STFSEB(SmallCNN(), 255 - images[0], samples=3)

        return Member(str(i), made, i, tmp_path / str(i))

    def prune(which, history):
        if which.name == "1" and len(history) == 3:
            raise Stop
        return False

    settings = {"epochs": 5, "batch_size": 64, "device": "cuda", "compiled": False, "checkpoint_every": 0}
    with pytest.raises(Stop):
        list(fit_population([member(0), member(1)], images, images, width=1, prune=prune, **settings))
    (found,) = fit_population([member(1)], images, images, width=1, **settings)
    assert [entry["epoch"] for entry in found.result.history] == [1, 2, 3, 4, 5]


def test_loader_of_tensors_without_shuffle(data, tmp_path):
    train, validation = data

    def run(steps=None, **more):
        method = make("mfvi", None)
        if steps is not None:
            crash_after(method, steps)
        return method, fit(method, DataLoader(TensorDataset(*train), batch_size=16), validation, **SETTINGS, **more)

    expected = run()
    with pytest.raises(Stop):
        run(9, checkpoint=tmp_path / "run", checkpoint_every=0)
    assert_same(expected, run(checkpoint=tmp_path / "run"))
