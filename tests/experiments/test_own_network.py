"""A task file that names a network of one's own: the whole command line, and every way it can be wrong."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import stfseb
from stfseb.cli import app
from stfseb.data.tasks import load_task
from stfseb.errors import StfsebError
from stfseb.experiments import compare as comparison
from stfseb.experiments.executors import run_jobs
from stfseb.experiments.executors.plan import planned
from stfseb.experiments.executors.work import Workplace
from stfseb.experiments.jobs import make_job
from stfseb.experiments.models import load_model
from stfseb.experiments.run import RunConfig, make_method, make_network, train_and_evaluate
from stfseb.experiments.search.plan import make_plan
from stfseb.networks.own import OtherNetworkWarning

RESNET = """
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.conv, self.norm, self.dropout = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), dropout

    def forward(self, x):
        return F.relu(x + F.dropout(self.norm(self.conv(x)), self.dropout, training=self.training))


class ResNet(nn.Module):
    def __init__(self, classes, in_channels=3, width=4, dropout=0.5, depth=2):
        super().__init__()
        self.stem = nn.Conv2d(in_channels, width, 3, stride=2, padding=1)
        self.body = nn.Sequential(*[Block(width, dropout) for _ in range(depth)])
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.body(self.stem(x)).mean((2, 3)))


def plain(classes, **others):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, classes))
"""
TASK = """
train: {folder: train}
test: {folder: test}
validation: {fraction: 0.25}
context: {folder: other}
ood: {other: {folder: strange}}
channels: 3
image_size: 16
dropout: 0.2
training: {epochs: 1, batch_size: 16, train_samples: 2, test_samples: 2}
"""
NETWORK = "network: {file: nets/resnet.py, make: ResNet, width: 6}\n"


@pytest.fixture
def photos(tmp_path) -> Path:
    random = np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 5), ("other", 6), ("strange", 6)):
        for number, name in enumerate(("bag", "shirt", "shoe")):
            folder = tmp_path / split / (name if split in ("train", "test") else "")
            folder.mkdir(parents=True, exist_ok=True)
            for i in range(count):
                pixels = random.integers(0, 90, (16, 16, 3), dtype=np.uint8)
                pixels[..., number] += 160 if split in ("train", "test") else 0
                Image.fromarray(pixels).save(folder / f"{name}{i}.png")
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "resnet.py").write_text(RESNET)
    write(tmp_path, NETWORK)
    return tmp_path


def write(folder: Path, network: str) -> str:
    (folder / "photos.yaml").write_text(TASK + network)
    return str(folder / "photos.yaml")


def edit(photos: Path, before: str, after: str) -> None:
    file = photos / "nets" / "resnet.py"
    assert before in file.read_text()
    file.write_text(file.read_text().replace(before, after))


def call(*arguments, errors: bool = True) -> str:
    done = CliRunner().invoke(app, [str(word) for word in arguments])
    if done.exception is not None:
        raise done.exception
    return done.output if errors else done.stdout


def trained(photos: Path, method: str = "mcdropout", **settings) -> Path:
    data = load_task(photos / "photos.yaml").load()
    train_and_evaluate(data, RunConfig(method, settings=settings), photos / method, progress=False)
    return photos / method / "model"


def test_the_file_makes_the_network_with_the_tasks_shape_and_its_own_settings(photos):
    task = load_task(photos / "photos.yaml")
    net = make_network(task)
    assert type(net).__name__ == "ResNet"
    assert (net.stem.in_channels, net.stem.out_channels, net.head.out_features) == (3, 6, 3)
    assert net.body[0].dropout == 0.2
    assert net.training
    write(photos, "network: {file: nets/resnet.py, make: ResNet, dropout: 0.4, depth: 1}")
    assert [block.dropout for block in make_network(load_task(photos / "photos.yaml")).body] == [0.4]


def test_a_task_that_names_no_dropout_leaves_the_networks_own_default(photos):
    edit(photos, "dropout=0.5", "dropout=0.1")
    named = load_task(photos / "photos.yaml")
    unnamed = (photos / "photos.yaml").read_text().replace("dropout: 0.2\n", "")
    (photos / "photos.yaml").write_text(unnamed)
    task = load_task(photos / "photos.yaml")
    assert (named.dropout, task.dropout) == (0.2, None)
    assert [block.dropout for block in make_network(task).body] == [0.1, 0.1]
    (photos / "photos.yaml").write_text(unnamed.replace(NETWORK, "network: small\n"))
    built_in = load_task(photos / "photos.yaml")
    assert built_in.dropout == make_network(built_in).spec["arguments"]["dropout"] == 0.5


def test_a_model_is_not_loaded_into_a_network_with_another_dropout(photos):
    model = trained(photos)
    own = type(make_network(load_task(photos / "photos.yaml")))
    stfseb.load(model, net=own(3, width=6, dropout=0.2))
    with pytest.raises(StfsebError, match=r"'body.0.dropout' .* 0.5, in the saved model .* 0.2 .*dropout=0.2, width=6"):
        stfseb.load(model, net=own(3, width=6))
    assert "network: ResNet of nets/resnet.py, dropout 0.2" in load_record(model.parent)["notes"]


def load_record(folder: Path) -> dict:
    return json.loads((folder / "record.json").read_text())


def test_compare_says_the_dropout_of_the_network(photos):
    said = call("compare", photos / "photos.yaml", "--methods", "mcdropout,map", "--out", photos / "runs")
    assert "note: network: ResNet of nets/resnet.py, dropout 0.2\n" in said
    assert said.count("note: network: ") == 1


def test_the_weights_are_those_of_the_seed_as_in_python(photos):
    data = load_task(photos / "photos.yaml").load()
    method = make_method(data, RunConfig("map", seed=5))
    torch.manual_seed(5)
    own = type(method.net)(classes=3, in_channels=3, width=6, dropout=0.2)
    for a, b in zip(method.net.parameters(), own.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_file_that_seeds_or_draws_when_it_is_imported_leaves_the_weights_to_the_runs_seed(photos):
    edit(photos, "class Block", "torch.manual_seed(1234)\nTABLE = torch.rand(3)\n\n\nclass Block")
    data = load_task(photos / "photos.yaml").load()
    first, again = (make_method(data, RunConfig("map", seed=5)) for _ in range(2))  # the first imports the file
    other = make_method(data, RunConfig("map", seed=6))
    assert torch.equal(first.net.head.weight, again.net.head.weight)
    assert not torch.equal(first.net.head.weight, other.net.head.weight)
    edit(photos, "torch.manual_seed(1234)\n", "")
    tables = []
    for seed in (5, 6):  # two processes, the first run of which has another seed
        sys.modules.pop(type(first.net).__module__)
        first = make_method(load_task(photos / "photos.yaml").load(), RunConfig("map", seed=seed))
        tables.append(sys.modules[type(first.net).__module__].TABLE)
    assert tables[0] is not tables[1]
    assert torch.equal(*tables)


HIDDEN = """

class Hidden(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.register_buffer("table", torch.randn(768, 16), persistent=False)
        self.phases = torch.rand(16)
        self.head = nn.Linear(16, classes)

    def forward(self, x):
        return self.head(torch.sin(x.flatten(1) @ self.table + self.phases))
"""


@pytest.mark.parametrize(("method", "settings"), [("map", {}), ("ensemble", {"members": 2})])
def test_what_a_network_draws_beside_its_weights_is_drawn_again(photos, method, settings):
    file = photos / "nets" / "resnet.py"
    file.write_text(file.read_text() + HIDDEN)
    data = load_task(write(photos, "network: {file: nets/resnet.py, make: Hidden}")).load()
    trained_one, _ = train_and_evaluate(data, RunConfig(method, 3, settings), photos / "run", progress=False)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    found = load_model(photos / "run" / "model", file)
    assert torch.equal(torch.get_rng_state(), state)
    x = data.test.images.float() / 255
    assert torch.equal(found.predict_proba(x), trained_one.predict_proba(x))


@pytest.mark.parametrize(("method", "settings"), [("mfvi", {}), ("ensemble", {"members": 2, "of": "fseb"})])
def test_layers_that_wait_for_their_first_images_have_their_shapes_in_a_saved_model(photos, method, settings):
    settings = {**settings, **({"settings": {"num_context": 4}} if method == "ensemble" else {})}
    write(photos, "network: {file: nets/resnet.py, make: plain}")
    data = load_task(photos / "photos.yaml").load()
    trained_one, _ = train_and_evaluate(data, RunConfig(method, 0, settings), photos / "run", progress=False)
    found = load_model(photos / "run" / "model", photos / "nets" / "resnet.py")
    x = data.test.images.float() / 255
    assert torch.equal(found.predict_proba(x, seed=1), trained_one.predict_proba(x, seed=1))


def test_ensembles_of_ensembles_and_of_both_kinds_of_network(photos):
    task, file = load_task(photos / "photos.yaml"), photos / "nets" / "resnet.py"
    x = torch.rand(4, 3, 16, 16)
    for number, members in enumerate(
        (
            [stfseb.MAP(stfseb.SmallCNN(3, 3, image_size=16)), stfseb.MAP(make_network(task))],
            [stfseb.Ensemble.of(lambda _: stfseb.MAP(make_network(task)), 2) for _ in range(2)],
        )
    ):
        ensemble = stfseb.Ensemble(members)
        before = ensemble.predict_proba(x)
        model = stfseb.save(ensemble, photos / f"model{number}")
        with pytest.raises(StfsebError, match=r"give --network nets/resnet.py"):
            stfseb.load(model)
        assert torch.equal(load_model(model, file).predict_proba(x), before)


def test_a_network_whose_own_attribute_spec_speaks_of_a_file_is_no_network_of_a_task(photos):
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 3))
    net.spec = {"file": "settings.yaml"}
    data = load_task(photos / "photos.yaml").load()
    stfseb.fit(stfseb.MAP(net), data.train, data.validation, epochs=1, progress=False, checkpoint=photos / "kept")


PARTIAL = """
from functools import partial
from torch.nn import Flatten, Identity, Linear, Sequential


def make(hidden, classes: int):
    return Sequential(Flatten(), Linear(768, hidden), Linear(hidden, classes))


assert make.__annotations__ == {"classes": int}  # the file is compiled as it would be by itself
Five = partial(make, 5)
"""


def test_partial_functions_and_imported_networks_are_names_too(photos):
    (photos / "own.py").write_text(PARTIAL)
    net = make_network(load_task(write(photos, "network: {file: own.py, make: Five}")))
    assert (net[1].out_features, net[2].out_features) == (5, 3)
    task = load_task(write(photos, "network: {file: own.py, make: Identity}"))
    with pytest.raises(StfsebError, match=r"Identity of own.py turns 2 images of 3x16x16 into \(2, 3, 16, 16\)"):
        make_network(task)


def test_a_damaged_model_or_one_that_names_other_things_than_networks(photos):
    model, file = trained(photos, "map"), photos / "nets" / "resnet.py"
    about = json.loads((model / "model.json").read_text())
    file.write_text("from os import system\n" + file.read_text())
    for entry, said in (
        ({"make": "system", "arguments": {"command": "touch harm"}}, "system of resnet.py is imported there"),
        ({"arguments": None}, "model.json does not say how its network is made"),
        ({"make": "Resnet"}, "did you mean 'ResNet'?"),
    ):
        (model / "model.json").write_text(json.dumps({**about, "network": {**about["network"], **entry}}))
        with pytest.warns(OtherNetworkWarning), pytest.raises(StfsebError) as told:
            load_model(model, file)
        assert said in str(told.value)


def test_layers_that_wait_for_their_first_images_get_their_shapes(photos):
    write(photos, "network: {file: nets/resnet.py, make: plain}")
    net = make_network(load_task(photos / "photos.yaml"))
    assert net[1].in_features == 3 * 16 * 16


def test_a_network_without_dropout_is_refused_where_dropout_is_the_method(photos):
    write(photos, "network: {file: nets/resnet.py, make: plain}")
    data = load_task(photos / "photos.yaml").load()
    torch.manual_seed(0)
    net = make_network(data.task)
    with pytest.raises(StfsebError) as python:
        stfseb.fit(stfseb.MCDropout(net), data.train, data.validation, epochs=1, progress=False)
    with pytest.raises(StfsebError) as task:
        train_and_evaluate(data, RunConfig("mcdropout"), photos / "run", progress=False)
    assert str(task.value) == str(python.value)
    assert "dropout" in str(task.value)
    train_and_evaluate(data, RunConfig("map"), photos / "map", progress=False)


WRONG = {
    "{file: nets/resent.py, make: ResNet}": "resent.py' does not exist: give the path of a Python file",
    "{file: nets, make: ResNet}": "is a folder: give the Python file in it",
    "{file: nets/resnet.py}": "'make' is missing: name the class or function of nets/resnet.py",
    "{file: nets/resnet.py, make: 3}": "make: 3 must be the name of a class or function",
    "{file: 3, make: ResNet}": "file: 3 must be the path of a Python file",
    "{make: ResNet}": "make: 'ResNet' needs the file that holds it",
    "{file: nets/resnet.py, name: small, make: R}": "both name (small) and file (nets/resnet.py): leave one",
    "{file: nets/resnet.py, make: ResNet, since: 2020-01-01}": "since: datetime.date(2020, 1, 1) cannot be an argument",
    "{file: nets/resnet.py, make: ResNet, width: .inf}": "width: inf cannot be an argument of ResNet",
    "{name: small, wide: 3}": "unknown key in network 'wide': did you mean 'hidden'? known are file, hidden, make",
    "resnet": "unknown network 'resnet'",
}


@pytest.mark.parametrize("network", WRONG, ids=range(len(WRONG)))
def test_wrong_entries_end_in_a_line(photos, network):
    with pytest.raises(StfsebError) as told:
        load_task(write(photos, f"network: {network}"))
    assert WRONG[network] in str(told.value)
    assert str(told.value).startswith("photos.yaml: ")
    assert "\n" not in str(told.value)


BROKEN = {
    "def ResNet(:": ("ResNet", "'broken.py' does not import: SyntaxError in line 1: invalid syntax"),
    "\nimport nosuchpackage": ("ResNet", "ModuleNotFoundError in line 2: No module named 'nosuchpackage': install it"),
    "x = 1\ny = [1][x]": ("ResNet", "does not import: IndexError in line 2: list index out of range: mend the file"),
    "import sys; sys.exit(3)": ("ResNet", "does not import: SystemExit in line 1: 3"),
    "class ResNet18: pass": ("resnet18", "unknown class or function of broken.py 'resnet18': did you mean 'ResNet18'?"),
    "x = 1": ("ResNet", "has no 'ResNet', nor any other class or function"),
    "ResNet = 3": ("ResNet", "ResNet of broken.py is a int: name a class or function"),
    "from torch import load as ResNet": ("ResNet", "is imported there: write a function in broken.py that calls it"),
    "def ResNet(): pass": ("ResNet", "ResNet of broken.py returns None, not a torch.nn.Module"),
    "def ResNet(widht): pass": (
        "ResNet, width: 3",
        "cannot be called as ResNet(width=3): missing a required argument: 'widht'; it takes widht",
    ),
    "def ResNet(classes):\n    return 1 / 0": ("ResNet", "(classes=3) of broken.py fails: ZeroDivisionError in line 2"),
    "def ResNet():\n    raise SystemExit(3)": ("ResNet", "ResNet() of broken.py fails: SystemExit in line 2: 3"),
    "from torch import nn\ndef ResNet(): return nn.Linear(16, 3)": ("ResNet", "2 images of 3x16x16 into (2, 3, 16, 3)"),
    "from torch import nn\ndef ResNet(): return nn.Sequential(nn.Flatten(), nn.Linear(768, 10))": (
        "ResNet",
        "into (2, 10), the task's classes ask for (2, 3)",
    ),
    "from torch import nn\ndef ResNet(): return nn.Linear(5, 3)": ("ResNet", "take images of 3x16x16: RuntimeError: "),
    "from torch import nn\nclass ResNet(nn.Module):\n  def forward(self, x):\n    return x.nothing": (
        "ResNet",
        "cannot take images of 3x16x16: AttributeError in line 4",
    ),
    "from torch import nn\nclass ResNet(nn.Module):\n  def forward(self, x):\n    return x, x": (
        "ResNet",
        "gives a tuple: let forward return a tensor of logits (N, 3)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("source", BROKEN, ids=range(len(BROKEN)))
def test_files_that_make_no_network_end_in_a_line(photos, source):
    make, said = BROKEN[source]
    (photos / "broken.py").write_text(source)
    task = load_task(write(photos, f"network: {{file: broken.py, make: {make}}}"))  # runs nothing yet
    with pytest.raises(StfsebError) as told:
        make_network(task)
    assert said in str(told.value)
    assert "\n" not in str(told.value)


def test_one_network_for_all_runs_is_refused(photos):
    (photos / "one.py").write_text(
        "from torch import nn\nnet = nn.Sequential(nn.Flatten(), nn.Linear(768, 3))\ndef make(): return net\n"
    )
    task = load_task(write(photos, "network: {file: one.py, make: make}"))
    make_network(task)
    with pytest.raises(StfsebError, match="returns the same network again"):
        make_network(task)


def test_an_edited_file_is_another_run_and_another_search(photos):
    task = str(photos / "photos.yaml")
    job, plan = make_job(task, "map"), make_plan(task, "map").identity
    (photos / "moved").mkdir()
    for name in ("train", "test", "other", "nets", "photos.yaml"):
        target = shutil.copytree if (photos / name).is_dir() else shutil.copy
        target(photos / name, photos / "moved" / name)
    moved = str(photos / "moved" / "photos.yaml")
    assert make_job(moved, "map").name == job.name  # wherever it lies
    edit(photos, "F.relu(x +", "F.gelu(x +")  # the same weights
    edited = make_job(task, "map")
    assert edited.name != job.name
    assert make_plan(task, "map").identity != plan
    with pytest.raises(StfsebError, match="its network's file, has changed since the run was planned"):
        job.load()
    assert edited.load().task.network.sha256 != load_task(moved).network.sha256


def test_a_file_edited_after_the_task_was_read_is_not_taken_for_the_one_that_was(photos):
    task = load_task(photos / "photos.yaml")
    edit(photos, "F.relu(x +", "F.gelu(x +")
    with pytest.raises(StfsebError, match="has changed since the command was started"):
        make_network(task)


def test_stopped_runs_go_on_with_the_same_file_only(photos):
    data = load_task(photos / "photos.yaml").load()
    runs = comparison.plan(["map"], [0], {}, RunConfig(""))
    (record,) = comparison.compare(data, runs, photos / "out", announce=lambda _: None, progress=False)
    made = record["network"]
    assert {key: made[key] for key in ("class", "file", "make")} == {
        "class": "ResNet",
        "file": "nets/resnet.py",
        "make": "ResNet",
    }
    assert made["arguments"] == {"classes": 3, "in_channels": 3, "dropout": 0.2, "width": 6}
    (again,) = comparison.compare(data, runs, photos / "out", announce=lambda _: None, progress=False)
    assert again["started"] == record["started"]
    assert again["network"] == made
    edit(photos, "F.relu(x +", "F.gelu(x +")
    data = load_task(photos / "photos.yaml").load()
    with pytest.raises(StfsebError, match="was run with network sha256="):
        comparison.compare(data, runs, photos / "out", announce=lambda _: None, progress=False)


def test_a_checkpoint_is_of_one_version_of_the_file(photos, monkeypatch):
    config = RunConfig("map", training={"epochs": 3})
    data = load_task(photos / "photos.yaml").load()
    calls = []

    def stop(method, *arguments):
        calls.append(1)
        if len(calls) > 4:  # in the second epoch
            raise KeyError("a crash")
        return inner(method, *arguments)

    inner = stfseb.MAP.terms
    monkeypatch.setattr(stfseb.MAP, "terms", stop)
    with pytest.raises(KeyError):
        train_and_evaluate(data, config, photos / "run", progress=False)
    monkeypatch.setattr(stfseb.MAP, "terms", inner)
    assert (photos / "run" / "checkpoint").exists()
    edit(photos, "F.relu(x +", "F.gelu(x +")
    with pytest.raises(StfsebError, match=r"network file is .* there and .* here"):
        train_and_evaluate(load_task(photos / "photos.yaml").load(), config, photos / "run", progress=False)
    edit(photos, "F.gelu(x +", "F.relu(x +")
    write(photos, NETWORK.replace("width: 6", "width: 6, dropout: 0.4"))  # the same weights, and the same file
    with pytest.raises(StfsebError, match=r"network's dropout is 0.2 there and 0.4 here"):
        train_and_evaluate(load_task(photos / "photos.yaml").load(), config, photos / "run", progress=False)
    _, record = train_and_evaluate(data, config, photos / "run", progress=False)
    assert len(record["history"]) == 3


def test_built_in_networks_leave_no_trace_of_this(photos):
    write(photos, "network: {name: small, hidden: 8}")
    model = trained(photos, "map")
    assert "network" not in json.loads((model.parent / "record.json").read_text())
    assert json.loads((model / "model.json").read_text())["network"]["network"] == "SmallCNN"
    with pytest.raises(StfsebError, match="the model's network is built in: leave --network out"):
        load_model(model, photos / "nets" / "resnet.py")


@pytest.mark.parametrize(("method", "settings"), [("mcdropout", {}), ("ensemble", {"members": 2})])
def test_a_model_names_its_file_and_never_runs_it(photos, method, settings):
    model, images, file = trained(photos, method, **settings), photos / "test" / "bag", photos / "nets" / "resnet.py"
    with pytest.raises(StfsebError, match=r"is ResNet of the file nets/resnet.py, .*: give --network nets/resnet.py"):
        call("predict", model, images)
    with pytest.raises(StfsebError, match=r"a task of your own, 'photos': give its file, --task photos.yaml"):
        call("evaluate", model)
    data = load_task(photos / "photos.yaml").load()
    fresh = [make_network(data.task) for _ in range(2)]
    net = torch.nn.ModuleList(fresh) if method == "ensemble" else fresh[0]
    x = data.test.images[:4].float() / 255
    found = load_model(model, file)
    assert torch.equal(found.predict_proba(x, seed=1), stfseb.load(model, net=net).predict_proba(x, seed=1))
    rows = json.loads(call("predict", model, images, "--network", file, "--json", errors=False))
    assert len(rows) == 5
    record = json.loads((model.parent / "record.json").read_text())
    for option in (["--task", photos / "photos.yaml"], ["--task", photos / "photos.yaml", "--network", file]):
        scores = json.loads(call("evaluate", model, *option, "--json", errors=False))
        assert scores["acc"] == pytest.approx(record["metrics"]["acc"])
        assert scores["nll"] == pytest.approx(record["metrics"]["nll"], rel=1e-5)


def test_nothing_runs_before_a_network_is_built_or_its_file_is_named(photos):
    edit(photos, "import torch\n", f"import torch\nopen({str(photos / 'ran')!r}, 'w').close()\n")
    task = str(photos / "photos.yaml")
    make_job(task, "map").load()
    make_plan(task, "map").identity  # noqa: B018
    assert not (photos / "ran").exists()
    model = trained(photos, "map")
    (photos / "ran").unlink()
    for name in [name for name in sys.modules if name.startswith("stfseb_network_")]:
        del sys.modules[name]  # as in a new process
    export = ("export", model, "--program", photos / "x.pt2")
    for command in (("predict", model, photos / "test"), ("calibrate", model, photos / "test"), export):
        with pytest.raises(StfsebError, match=r"give --network nets/resnet.py"):
            call(*command)
    with pytest.raises(StfsebError, match=r"give --network nets/resnet.py"):
        call("evaluate", model, "--task", "mini")
    assert not (photos / "ran").exists()
    load_model(model, photos / "nets" / "resnet.py")
    assert (photos / "ran").exists()


def test_a_calibrated_model_still_knows_its_file(photos):
    model, file = trained(photos), photos / "nets" / "resnet.py"
    before = json.loads((model / "model.json").read_text())
    assert "Calibrated on 15 images" in call("calibrate", model, photos / "test", "--answer", 0.5, "--coverage", 0.7,
                                             "--false-alarms", 0.3, "--network", file)  # fmt: skip
    after = json.loads((model / "model.json").read_text())
    assert after["network"] == before["network"]
    assert after["calibration"] != before["calibration"]
    call("predict", model, photos / "test" / "bag", "--network", file)
    edit(photos, "F.relu(x +", "F.gelu(x +")
    for _ in range(2):  # the model stays one of the file of its training
        with pytest.warns(OtherNetworkWarning, match=f"sha256 {before['network']['sha256'][:12]}"):
            call("calibrate", model, photos / "test", "--answer", 0.5, "--coverage", 0.7, "--false-alarms", 0.3,
                 "--network", file)  # fmt: skip
    assert json.loads((model / "model.json").read_text())["network"] == before["network"]


def test_another_file_than_the_one_of_the_training_is_told(photos):
    model, file = trained(photos), photos / "nets" / "resnet.py"
    edit(photos, "F.relu(x +", "F.gelu(x +")
    recorded = json.loads((model / "model.json").read_text())["network"]["sha256"]
    with pytest.warns(OtherNetworkWarning, match=f"sha256 {recorded[:12]}") as told:
        load_model(model, file)
    assert load_task(photos / "photos.yaml").network.sha256[:12] in str(told[0].message)
    edit(photos, "width=4", "width=4, wide=7")
    edit(photos, "self.head = nn.Linear(width, classes)", "self.head = nn.Linear(width, classes + 1)")
    with (
        pytest.warns(OtherNetworkWarning),
        pytest.raises(StfsebError, match=r"do not fit ResNet: net.*head.* in the network.*: give the"),
    ):
        load_model(model, file)
    with pytest.raises(StfsebError, match=r"gone.py' does not exist"):
        load_model(model, photos / "gone.py")


def test_a_model_from_python_says_that_python_is_its_way(photos):
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 3))
    method = stfseb.MAP(net)
    method.predict_proba(torch.rand(2, 3, 16, 16))
    stfseb.save(method, photos / "model")
    with pytest.raises(StfsebError, match=r"does not say how its network is made.*load\(path, net=...\)"):
        load_model(photos / "model", photos / "nets" / "resnet.py")


def test_missing_parts_are_measured_from_the_saved_model(photos):
    (photos / "photos.yaml").write_text(TASK + NETWORK + "shifts: {rotation: [0, 30]}\n")
    job = make_job(str(photos / "photos.yaml"), "map")
    for parts in ((), ("rotation",)):
        (entry,) = planned([job], photos / "results", parts)
        states = [(report.state, report.error) for report in Workplace("cpu").do([entry])]
        assert states == [("started", ""), ("done", "")]
    assert (entry.folder / "rotation.json").exists()


@pytest.mark.slow
def test_compare_and_export(photos):
    call("compare", photos / "photos.yaml", "--methods", "mcdropout,map,map", "--out", photos / "runs", "--quiet")
    (model,) = photos.glob("runs/photos-*/photos-mcdropout-seed0/model")
    assert len(list(photos.glob("runs/photos-*/*/record.json"))) == 2  # each method once
    file = photos / "nets" / "resnet.py"
    call("export", model, "--program", photos / "model.pt2", "--network", file, "--samples", 2)
    x = load_task(photos / "photos.yaml").load().test.images[:4].float() / 255
    _, mean = torch.export.load(photos / "model.pt2").module()(x)
    expected = load_model(model, file).predict_proba(x, samples=2, seed=0)
    assert torch.allclose(mean, expected, atol=1e-5)


def test_a_search_is_of_one_version_of_the_file(photos):
    command = ("search", photos / "photos.yaml", "--method", "map", "--trials", 2, "--out", photos / "out", "--quiet")
    call(*command)
    (found,) = photos.glob("out/searches/*/search.json")
    assert len(json.loads(found.read_text())["trials"]) == 2
    edit(photos, "F.relu(x +", "F.gelu(x +")
    with pytest.raises(StfsebError, match="task file"):
        call(*command)


@pytest.mark.slow
def test_other_processes_find_the_file(photos):
    jobs = [make_job(str(photos / "photos.yaml"), "map", seed) for seed in (0, 1)]
    outcome = run_jobs(jobs, photos / "out", processes=2, device="cpu", announce=lambda _: None, progress=False)
    assert not outcome.failed
    assert len({job.record(photos / "out")["network"]["sha256"] for job in jobs}) == 1


def test_the_file_of_the_documentation_is_one(photos):
    text = (Path(__file__).parents[2] / "docs" / "own-network.md").read_text(encoding="utf-8")
    (source, *_) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (entry,) = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (photos / "resnet.py").write_text(source)
    net = make_network(load_task(write(photos, entry)))
    assert (net.stem.in_channels, net.stem.out_channels, net.head.out_features) == (3, 32, 3)


@pytest.mark.slow
def test_the_remedy_is_one_line_on_the_screen(photos):
    model = trained(photos, "map").relative_to(photos)

    def said(*options):
        command = [sys.executable, "-m", "stfseb", "predict", str(model), "test/bag", *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, cwd=photos, env=environment, capture_output=True, text=True, timeout=300)

    without = said()
    assert (without.returncode, without.stderr.count("\n")) == (2, 1)
    assert "give --network nets/resnet.py" in without.stderr
    edit(photos, "F.relu(x +", "F.gelu(x +")
    other = said("--network", "nets/resnet.py")
    assert other.returncode == 0
    warning, *more = other.stderr.splitlines()
    assert warning.startswith("stfseb: warning: ")
    assert all(line.startswith("note: the model has learnt nothing") for line in more)  # it is hardly trained
