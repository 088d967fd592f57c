"""Signals, a full disk, a folder that cannot be written, too little memory, NaN: each provoked, each survived."""

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from stfseb import FSEB, MAP, STFSEB, Ensemble, MCDropout, StfsebError, fit
from stfseb.methods.memory import NoMemoryError, is_out_of_memory
from stfseb.training import checkpoint
from stfseb.training.fit import DivergedError
from stfseb.training.interrupts import Interrupted, Interrupts
from stfseb.training.population import Member, fit_population

SETTINGS = {"epochs": 4, "batch_size": 16, "lr": 2e-2, "progress": False, "seed": 4}


@pytest.fixture(scope="module")
def data():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(90, 6, generator=g)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    return (x[:70], y[:70]), (x[70:], y[70:])


def make(rate=0.5, net=None):
    torch.manual_seed(7)
    layers = [nn.Linear(6, 16), nn.ReLU(), nn.Dropout(rate), nn.Linear(16, 3)]
    return MCDropout(nn.Sequential(*layers) if net is None else net(*layers), samples=2)


def at_step(method, step, action):
    """Do something in the middle of one step, between its forward pass and its update."""
    inner, made = method.objective, [0]

    def objective(*arguments):
        terms = inner(*arguments)
        made[0] += 1
        if made[0] == step:
            action()
        return terms

    method.objective = objective
    return method


def kill(signum):
    return lambda: os.kill(os.getpid(), signum)


def same(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def plain(result):
    return [{k: v for k, v in entry.items() if k != "seconds"} for entry in result.history]


# Signals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("signum", "code", "name"), [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")])
@pytest.mark.parametrize("step", [1, 7, 10])
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(signum, code, name, step, data, tmp_path):
    """In the middle of an epoch of five steps, and in the last step of one: the rest gives the same model."""
    whole = make()
    expected = fit(whole, *data, **SETTINGS)
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    file = tmp_path / "run"
    with pytest.raises(Interrupted, match=f"stopped by {name} in epoch {1 + (step - 1) // 5} of 4") as caught:
        fit(at_step(make(), step, kill(signum)), *data, **SETTINGS, checkpoint=file)
    assert caught.value.exit_code == code
    assert f"saved in {file}" in str(caught.value)
    assert "same checkpoint" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    state = checkpoint.read(file)[1]
    assert 5 * state["epoch"] + state["steps"] == step  # the step under way was finished, no other begun
    resumed = make()
    assert plain(fit(resumed, *data, **SETTINGS, checkpoint=file)) == plain(expected)
    assert same(whole, resumed)


def test_a_signal_between_epochs_and_after_the_last(data, tmp_path):
    for epoch in (2, 4):
        file = tmp_path / str(epoch)

        def stop(entry, epoch=epoch):
            if entry["epoch"] == epoch:
                os.kill(os.getpid(), signal.SIGTERM)

        with pytest.raises(Interrupted, match=f"after epoch {epoch} of 4"):
            fit(make(), *data, **SETTINGS, checkpoint=file, callback=stop)
        assert checkpoint.read(file)[1]["epoch"] == epoch
        assert len(fit(make(), *data, **SETTINGS, checkpoint=file).history) == 4


def test_without_a_checkpoint_nothing_is_saved_and_that_is_said(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Interrupted, match=r"nothing was saved; give checkpoint='FILE'"):
        fit(at_step(make(), 3, kill(signal.SIGINT)), *data, **SETTINGS)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("signum", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_second_signal_ends_at_once(signum, error, data, tmp_path):
    def twice():
        os.kill(os.getpid(), signum)
        os.kill(os.getpid(), signum)
        pytest.fail("the second signal was not heard")

    handler = signal.getsignal(signum)
    with pytest.raises(error):
        fit(at_step(make(), 3, twice), *data, **SETTINGS, checkpoint=tmp_path / "run")
    assert signal.getsignal(signum) is handler


def test_handlers_are_the_main_threads_and_ignored_signals_stay_ignored(data, tmp_path):
    seen, results = [], []

    def look():
        seen.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    other = threading.Thread(target=lambda: results.append(fit(at_step(make(), 2, look), *data, **SETTINGS)))
    other.start()
    other.join()
    assert seen == [before]
    assert len(results[0].history) == 4
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as under nohup
    try:
        result = fit(at_step(make(), 2, kill(signal.SIGINT)), *data, **SETTINGS)
        assert len(result.history) == 4
    finally:
        signal.signal(signal.SIGINT, former)


def test_the_error_survives_the_way_between_processes():
    error = Interrupted(15, "in epoch 3", "saved in x; go on")
    made, arguments = error.__reduce__()[:2]
    assert str(made(*arguments)) == str(error)
    assert made(*arguments).exit_code == 143
    with Interrupts() as interrupts:
        assert interrupts.caught is None


def test_a_population_saves_and_goes_on(data, tmp_path):
    settings = {k: v for k, v in SETTINGS.items() if k not in ("progress", "seed")}

    def members(stop=False, kept=True):
        def maker(i):
            return at_step(make(), 8, kill(signal.SIGTERM)) if stop and i == 1 else make()

        return [Member(str(i), lambda i=i: maker(i), i, tmp_path / str(i) if kept else None) for i in range(3)]

    expected = {o.member.name: o for o in fit_population(members(kept=False), *data, **settings)}
    finished = []
    with pytest.raises(Interrupted, match="in epoch 2 of 4, step 3 of 5"):
        finished.extend(o.member.name for o in fit_population(members(stop=True), *data, **settings))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1"]
    found = {o.member.name: o for o in fit_population(members(), *data, **settings)}
    for name, outcome in expected.items():
        assert same(outcome.method, found[name].method)
        assert plain(outcome.result) == plain(found[name].result)


# Disk ------------------------------------------------------------------------------------------------

SCRIPT = """
import errno, json, logging, os, signal, sys
from pathlib import Path
import torch
from torch import nn
import stfseb
from stfseb import MAP, StfsebError, fit
from stfseb.training import checkpoint

folder, mounted = Path(sys.argv[1]), sys.argv[2] == "mounted"
said = []

class Kept(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())

logging.getLogger("stfseb").addHandler(Kept())
g = torch.Generator().manual_seed(1)
x = torch.randn(64, 6, generator=g)
y = (x[:, 0] > 0).long()

def make():
    torch.manual_seed(0)
    return MAP(nn.Sequential(nn.Linear(6, 512), nn.ReLU(), nn.Linear(512, 2)))

def fill():
    if not mounted:
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        return
    with (folder / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1024))
        except OSError as error:
            assert error.errno == errno.ENOSPC

def free():
    if not mounted:
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    else:
        (folder / "filler").unlink()

settings = dict(epochs=6, batch_size=16, progress=False, checkpoint_every=0)
whole = make()
expected = fit(whole, (x, y), (x, y), **{**settings, "checkpoint_every": None})
file, seen, out = folder / "run", [], {}

def during(entry):
    if entry["epoch"] == 2:
        seen.append(file.read_bytes())
        fill()
    if entry["epoch"] == 4:
        seen.append(file.read_bytes())
        out["parts"] = [p.name for p in folder.iterdir() if p.name not in ("run", "filler")]
        free()

method = make()
result = fit(method, (x, y), (x, y), **settings, checkpoint=file, callback=during)
out["intact"] = seen[0] == seen[1]
out["same"] = all(torch.equal(p, q) for p, q in zip(whole.parameters(), method.parameters()))
out["warnings"] = said
out["end"] = checkpoint.read(file)[1]["result"]["stopped"]

fill()
try:
    stfseb.save(method, folder / "model")
    out["save"] = "written"
except StfsebError as error:
    out["save"] = str(error)
out["half"] = sorted(p.name for p in (folder / "model").iterdir())
free()

other = folder / "other"
def stop(entry):
    if entry["epoch"] == 2:
        fill()
        os.kill(os.getpid(), signal.SIGTERM)
try:
    fit(make(), (x, y), (x, y), **{**settings, "checkpoint_every": None}, checkpoint=other, callback=stop)
except StfsebError as error:
    out["stopped"], out["code"] = str(error), error.exit_code
free()
out["left"] = checkpoint.read(other)[1]["epoch"]
again = make()
fit(again, (x, y), (x, y), **settings, checkpoint=other)
out["again"] = all(torch.equal(p, q) for p, q in zip(whole.parameters(), again.parameters()))

if mounted:
    os.system(f"mount -o remount,ro {folder}")
    def forbidden(*_):
        raise AssertionError("training began")
    method = make()
    method.objective = forbidden
    try:
        fit(method, (x, y), (x, y), **settings, checkpoint=folder / "new" / "run")
    except StfsebError as error:
        out["read only"] = str(error)
print(json.dumps(out))
"""


def run_script(tmp_path, text, *, mount):
    """Run a script in a process of its own, with a small file system of its own where the system lets us."""
    folder = tmp_path / "disk"
    folder.mkdir()
    (tmp_path / "script.py").write_text(textwrap.dedent(text))
    command = [sys.executable, str(tmp_path / "script.py"), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    mounting = f"mount -t tmpfs -o size=1m tmpfs '{folder}'"
    mounted = mount and subprocess.run(["unshare", "-rm", "sh", "-c", mounting], check=False).returncode == 0
    if mounted:
        words = " ".join(f"'{word}'" for word in [*command, "mounted"])
        command = ["unshare", "-rm", "sh", "-c", f"{mounting} && exec {words}"]
    else:
        command.append("limited")
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False), mounted


@pytest.mark.parametrize("mount", [True, False])
def test_a_full_disk(mount, tmp_path):
    """Training goes on with a warning and the checkpoint before stays; a final save ends in one line, nothing half."""
    done, mounted = run_script(tmp_path, SCRIPT, mount=mount)
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout)
    why = "No space left on device" if mounted else "File too large"
    assert out["intact"]
    assert out["parts"] == []
    assert out["same"]
    assert out["end"] == "epochs"
    assert len(out["warnings"]) == 1, out["warnings"]
    assert why in out["warnings"][0]
    assert "the one of epoch 2" in out["warnings"][0]
    assert "training goes on" in out["warnings"][0]
    assert "cannot write" in out["save"]
    assert why in out["save"]
    assert "\n" not in out["save"]
    assert out["half"] == []
    assert why in out["stopped"]
    assert "of epoch 1 stays" in out["stopped"]
    assert out["code"] == 143
    assert out["left"] == 1
    assert out["again"]
    if mounted:
        assert "Read-only file system" in out["read only"]
        assert "\n" not in out["read only"]


def test_a_folder_that_cannot_be_written_is_named_before_training(data, tmp_path):
    def forbidden(*_):
        raise AssertionError("training began")

    (tmp_path / "file").write_text("")
    for path in (Path("/proc/checkpoint"), tmp_path / "file" / "run"):
        method = make()
        method.objective = forbidden
        with pytest.raises(StfsebError, match=f"checkpoint {path} cannot be") as caught:
            fit(method, *data, **SETTINGS, checkpoint=path)
        assert "\n" not in str(caught.value)


# Memory ----------------------------------------------------------------------------------------------


class Small(nn.Sequential):
    """Has memory for so many rows at once, when it trains."""

    limit = 5
    seen = 0

    def forward(self, x):
        out = super().forward(x)
        if self.training:  # behind the dropout, where samples have rows of their own
            if len(out) > self.limit:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB\nand more lines")
            Small.seen = max(Small.seen, len(out))
        return out


def layers(rate=0.0):
    torch.manual_seed(7)
    return [nn.Linear(6, 16), nn.Tanh(), nn.Dropout(rate), nn.Linear(16, 3)]


def context():
    return torch.randn(50, 6, generator=torch.Generator().manual_seed(2)) * 3


METHODS = {
    "map": (MAP, 5),
    "stfseb": (lambda net: STFSEB(net, context(), num_context=4, samples=2, prior_weight=1.0), 20),
    "stfseb, once an epoch": (
        lambda net: STFSEB(net, context(), num_context=4, samples=2, prior_weight=1.0, functional_scale="epoch"), 20,
    ),
    "stfseb, rows of the minibatch": (
        lambda net: STFSEB(net, "train", num_context=12, samples=2, prior_weight=1.0), 40,
    ),
    "fseb": (lambda net: FSEB(net, context(), num_context=4, samples=2, rel_sigma_init=1e-6), 8),
}  # fmt: skip


@pytest.mark.parametrize("name", list(METHODS))
def test_too_little_memory_halves_the_rows_and_keeps_the_objective(name, data, caplog, monkeypatch):
    """Deterministic networks: the terms and the weights are those of the whole minibatch, up to rounding."""
    maker, limit = METHODS[name]
    monkeypatch.setattr(Small, "limit", limit)
    monkeypatch.setattr(Small, "seen", 0)
    whole, parts = maker(nn.Sequential(*layers()).double()), maker(Small(*layers()).double())
    pairs = [(x.double(), y) for x, y in data]
    expected = fit(whole, *pairs, **SETTINGS)
    found = fit(parts, *pairs, **SETTINGS)
    lines = [r.getMessage() for r in caplog.records if "out of memory" in r.getMessage()]
    assert lines
    assert "16 rows at once" in lines[0]
    assert "going on with 8 at once" in lines[0]
    assert all("\n" not in line for line in lines)
    assert 1 < Small.seen <= limit
    for one, two in zip(expected.history, found.history, strict=True):
        for term in ("data", "function", "weights", "validation_nll"):
            assert two[term] == pytest.approx(one[term], rel=1e-4, abs=1e-9), term
    for p, q in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-3, atol=1e-4)


def test_a_failed_attempt_leaves_no_trace_and_the_rows_are_kept(data, tmp_path, monkeypatch):
    """With dropout: the same numbers as a run that knew the rows beforehand; and a resumed run knows them."""
    from stfseb.training.engine import EagerEngine

    def run(net, **more):
        method = STFSEB(net, context(), num_context=2, samples=2)
        return method, fit(method, *data, **SETTINGS, **more)

    monkeypatch.setattr(Small, "limit", 14)  # 2 samples x (4 rows + 2 context rows) = 12
    found = run(Small(*layers(0.5)))
    inner = EagerEngine.__init__

    def knowing(self, *arguments, **more):
        inner(self, *arguments, **more)
        self.folds.rows = 4

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EagerEngine, "__init__", knowing)
        patch.setattr(Small, "limit", 10**6)
        expected = run(Small(*layers(0.5)))
    assert plain(found[1]) == plain(expected[1])
    assert same(found[0].net, expected[0].net)
    file = tmp_path / "run"
    method = STFSEB(Small(*layers(0.5)), context(), num_context=2, samples=2)
    with pytest.raises(Interrupted):
        fit(at_step(method, 20, kill(signal.SIGTERM)), *data, **SETTINGS, checkpoint=file)
    assert checkpoint.read(file)[1]["rows"] == 4
    resumed = run(Small(*layers(0.5)), checkpoint=file)
    assert plain(resumed[1]) == plain(expected[1])
    assert same(resumed[0].net, expected[0].net)


def test_batch_norm_is_put_back_and_keeps_two_rows(data, monkeypatch):
    monkeypatch.setattr(Small, "limit", 5)
    net = [nn.BatchNorm1d(6), Small(*layers())]
    method = MAP(nn.Sequential(*net))
    fit(method, *data, **{**SETTINGS, "epochs": 1, "batch_size": 35})
    # 35 rows fail whole, in 3 parts and in 6, and run in 12. Every failed attempt is undone: the running mean has
    # seen the parts that counted, of two steps.
    assert int(net[0].num_batches_tracked) == 24
    monkeypatch.setattr(Small, "limit", 1)
    with pytest.raises(NoMemoryError, match="2 rows of a minibatch do not fit"):
        fit(MAP(nn.Sequential(nn.BatchNorm1d(6), Small(*layers()))), *data, **SETTINGS)


def test_one_row_that_does_not_fit_is_an_error_in_one_line(data, monkeypatch, tmp_path):
    monkeypatch.setattr(Small, "limit", 0)
    with pytest.raises(NoMemoryError, match="1 row of a minibatch does not fit into memory") as caught:
        fit(MAP(Small(*layers())), *data, **SETTINGS)
    assert "\n" not in str(caught.value)
    members = [Member("small", lambda: MAP(Small(*layers()))), Member("other", lambda: MAP(nn.Sequential(*layers())))]
    found = {o.member.name: o for o in fit_population(members, *data, epochs=2)}
    assert "does not fit into memory" in found["small"].error
    assert len(found["other"].result.history) == 2


@pytest.mark.parametrize(
    ("make", "held", "remedy"),
    [
        (lambda net: STFSEB(net, context(), num_context=24, samples=2), "num_context=24 and samples=2", "lower both"),
        (lambda net: STFSEB(net, "train", num_context=12, samples=3), "num_context=12 and samples=3", "lower both"),
        (lambda net: FSEB(net, context(), num_context=24, variant="map"), "num_context=24", "lower num_context, "),
        (lambda net: STFSEB(net, context(), samples=2, functional_scale=0), "samples=2", "lower samples, "),
        (lambda net: STFSEB(net, context(), num_context=1, samples=4), "samples=4", "lower samples, "),
        (lambda net: MCDropout(net, samples=5), "samples=5", "lower samples, "),
        (MAP, "", "take a smaller network"),
    ],
)
def test_what_does_not_fit_beside_one_row_is_named(make, held, remedy, data, monkeypatch):
    """Data rows are run in ever smaller parts, context rows and samples are not: lowering them is left to the user."""
    monkeypatch.setattr(Small, "limit", 0 if make is MAP else 1)
    with pytest.raises(NoMemoryError) as caught:
        fit(make(Small(*layers(0.1))), *data, **SETTINGS)
    said = f" with {held}" if held else ""
    remedy = remedy.replace("both", "num_context or samples, ")
    line = str(caught.value)
    assert line.startswith(f"1 row of a minibatch does not fit into memory{said} (CUDA out of memory. Tried")
    assert f"): {remedy}" in line
    assert line.endswith("take a smaller network, or a device with more memory")
    assert "\n" not in line


def test_the_members_of_an_ensemble_are_looked_at(data, monkeypatch):
    monkeypatch.setattr(Small, "limit", 5)
    nets = [Small(*layers()) for _ in range(2)]
    for number, parameter in enumerate(nets[1].parameters()):
        nn.init.constant_(parameter, 0.1 * number)
    with pytest.raises(NoMemoryError, match=r"memory with num_context=6 and samples=2 \(.*: lower num_context or"):
        fit(Ensemble([STFSEB(net, context(), num_context=6, samples=2) for net in nets]), *data, **SETTINGS)


class Narrow(nn.Sequential):
    """In evaluation no more than `limit` rows fit."""

    limit = 3

    def forward(self, x):
        if not self.training and len(x) > self.limit:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate")
        return super().forward(x)


def test_validation_and_what_follows_go_on_with_fewer_rows(data, caplog):
    whole, parts = MAP(nn.Sequential(*layers())), MAP(Narrow(*layers()))
    expected, found = fit(whole, *data, **SETTINGS), fit(parts, *data, **SETTINGS)
    said = [record.message for record in caplog.records if "out of memory in prediction" in record.message]
    assert said[-1] == "out of memory in prediction: going on with 2 rows at once"
    assert len(said) == len(set(said))  # each size fails once: the next prediction begins with what was borne
    for one, two in zip(expected.history, found.history, strict=True):
        assert two["validation_nll"] == pytest.approx(one["validation_nll"], rel=1e-5)
    torch.testing.assert_close(parts.predict_proba(data[1][0]), whole.predict_proba(data[1][0]))


def test_memory_that_ends_in_the_score_ends_one_run_of_a_population_alone(data, monkeypatch):
    method = MAP(nn.Sequential(*layers()))
    monkeypatch.setattr(
        method.likelihood, "log_predictive", lambda *_: (_ for _ in ()).throw(MemoryError()), raising=False
    )
    members = [Member("full", lambda: method), Member("other", lambda: MAP(nn.Sequential(*layers())))]
    found = {o.member.name: o for o in fit_population(members, *data, epochs=2)}
    assert found["full"].error.startswith("validation with 1 sample does not fit into memory: lower")
    assert len(found["other"].result.history) == 2


def test_a_prediction_of_which_one_row_does_not_fit_is_one_line(data, monkeypatch):
    monkeypatch.setattr(Narrow, "limit", 0)
    with pytest.raises(NoMemoryError, match="1 row with 4 samples does not fit into memory: take fewer") as caught:
        MCDropout(Narrow(nn.Linear(6, 3), nn.Dropout(0.1)), samples=4).predict_proba(data[1][0])
    assert "\n" not in str(caught.value)


def test_other_errors_are_not_taken_for_memory():
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("std::bad_alloc"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("not enough memory"))


REAL = """
import json, logging, resource, sys
import torch
from torch import nn
from stfseb import MAP, fit

torch.set_num_threads(1)
said = []

class Kept(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())

logging.getLogger("stfseb").addHandler(Kept())
g = torch.Generator().manual_seed(1)
x = torch.randn(256, 8, generator=g)
y = (x[:, 0] > 0).long()

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 64), nn.Linear(64, 2)

    def forward(self, x):
        h = torch.relu(self.a(x))
        if self.training:  # 1 MiB a row
            h = h + (h[:, :1, None] * torch.ones(1, 256, 1024)).mean((1, 2))[:, None] * 0
        return self.b(h)

method = MAP(Wide())
fit(method, (x[:8], y[:8]), (x, y), epochs=1, batch_size=8, progress=False)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 150 * 2**20, resource.RLIM_INFINITY))
result = fit(method, (x, y), (x, y), epochs=1, batch_size=256, progress=False)
print(json.dumps({"said": said, "data": result.history[0]["data"]}))
"""


def test_the_real_allocator_refusing(tmp_path):
    """A limit on the process's address space: 256 rows want 256 MiB and more, 150 are left."""
    done, _ = run_script(tmp_path, REAL, mount=False)
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout)
    assert out["said"], done.stderr
    assert "out of memory with 256 rows at once" in out["said"][0]
    assert "DefaultCPUAllocator" in out["said"][0]
    assert math.isfinite(out["data"])


ONEDNN = """
import json, os, resource, sys
import torch
from torch import nn
from stfseb import MAP
from stfseb.methods import base
from stfseb.methods.memory import NoMemoryError

torch.set_num_threads(1)
torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
method, x = MAP(nn.Sequential(net, nn.Linear(16, 5))), torch.rand(64, 3, 32, 32)
said, inner = [], base.is_out_of_memory

def asked(error):
    said.append(str(error))
    return inner(error)

base.is_out_of_memory = asked

def attempt(spare):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + spare, resource.RLIM_INFINITY))
    found, error = None, ""
    try:
        found = method.predict_proba(x)
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    right = None if found is None else torch.allclose(found, method.predict_proba(x), atol=1e-5)
    return {"error": error, "right": right, "of oneDNN": sum("could not create a primitive" in one for one in said)}

for spare in (1, 2, 3, 8):  # MiB: in the first three oneDNN is the one to find none left
    reading, writing = os.pipe()
    if not (child := os.fork()):  # each with its own heap, and with no primitive made yet
        os.write(writing, json.dumps(attempt(spare * 2**20)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    print(os.read(reading, 10000).decode())
"""


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
def test_onednn_without_memory(tmp_path):
    """It says that it could not create a primitive: fewer rows are tried, and in the end it is one line of ours."""
    done, _ = run_script(tmp_path, ONEDNN, mount=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 4
    for one in found:
        if one["right"] is None:
            assert one["error"].startswith("NoMemoryError: 1 row with 1 sample does not fit into memory: take fewer")
            assert "\n" not in one["error"]
        else:
            assert one["right"]
    assert any(one["right"] for one in found)
    if not any(one["of oneDNN"] for one in found):
        pytest.skip("here another allocator was always the first to find no memory")


# NaN -------------------------------------------------------------------------------------------------


class Breaks(nn.Sequential):
    """Returns infinities after so many passes in training."""

    passes, good = 0, 12

    def forward(self, x):
        self.passes += self.training
        out = super().forward(x)
        return out * math.inf if self.passes > self.good else out


def test_nan_leaves_the_last_good_checkpoint_and_says_so(data, tmp_path, monkeypatch):
    file = tmp_path / "run"
    with pytest.raises(DivergedError, match="data term became nan in epoch 3") as caught:
        fit(make(net=Breaks), *data, **SETTINGS, checkpoint=file, checkpoint_every=0)
    assert f"the checkpoint {file} of epoch 3, step 2, stays" in str(caught.value)
    assert "\n" not in str(caught.value)
    tensors, state = checkpoint.read(file)
    assert (state["epoch"], state["steps"]) == (2, 2)
    assert all(torch.isfinite(v).all() for name, v in tensors.items() if name.startswith("model/"))
    monkeypatch.setattr(Breaks, "good", 1000)
    expected, mended = make(net=Breaks), make(net=Breaks)
    fit(expected, *data, **SETTINGS)
    fit(mended, *data, **SETTINGS, checkpoint=file)  # nothing of the error is left in the file
    assert same(expected, mended)


def test_weights_that_are_not_finite_are_never_kept(data, tmp_path):
    """A finite loss with a gradient that is not: the update breaks the weights, the next step finds out."""
    method = make()
    made = [0]

    def hook(gradient):
        made[0] += 1
        return gradient * math.nan if made[0] == 10 else gradient  # the last step of the second epoch

    method.net[0].weight.register_hook(hook)
    with pytest.raises(DivergedError, match="in epoch 3") as caught:
        fit(method, *data, **SETTINGS, checkpoint=tmp_path / "run", checkpoint_every=0)
    assert "of epoch 2, step 4, stays" in str(caught.value)
    again = make()
    again.net[0].weight.register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(Interrupted, match=r"could not be written \(the weights are not finite\); nothing was saved"):
        fit(at_step(again, 1, kill(signal.SIGTERM)), *data, **SETTINGS, checkpoint=tmp_path / "other")
    assert not (tmp_path / "other").exists()
    tensors, _ = checkpoint.read(tmp_path / "run")
    assert all(torch.isfinite(v).all() for name, v in tensors.items() if name.startswith("model/"))
