"""Splitting a step, mixed precision and compilation leave the objective what it is."""

import os
import shutil
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
from two_processes import NUM_DATA, OURS, ROWS, batch, make

from stfseb import MLP, STFSEB, SmallCNN
from stfseb.likelihoods import GaussianRegression, StudentTRegression

COMPILER = shutil.which(os.environ.get("CXX") or "g++") and Path(sysconfig.get_path("include"), "Python.h").is_file()
KINDS = ("stfseb", "epoch", "mcdropout", "map")


def gradients(method):
    return {name: p.grad.clone() for name, p in method.named_parameters()}


def whole(kind):
    method = make(kind)
    x, y = batch()
    (method.objective(x, y, NUM_DATA).total / ROWS).backward()
    return gradients(method)


def together(kind, out):
    """Whether two processes met and took their step; gloo's meeting, not ours, has been seen to hang."""
    script = Path(__file__).with_name("two_processes.py")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, script, kind]
    processes = [subprocess.Popen([*command, str(rank), port, out]) for rank in (0, 1)]
    try:
        code = processes[0].wait(timeout=120)
        assert code != OURS, "the step itself failed"
        return code == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        for process in processes:
            process.kill()
            process.wait()


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("map", "seeded independent", "seeded callable")]


@pytest.mark.parametrize("kind", ["stfseb", "seeded", *SLOW])  # seeded: each process constructs it with its own seed
def test_two_processes_give_the_gradients_of_one(kind, tmp_path):
    out = tmp_path / "gradients.safetensors"
    assert any(together(kind, out) for _ in range(3))  # what they found is never asked for twice, only the meeting
    found, expected = load_file(out), whole(kind)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] - value).abs().max() < 1e-5, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(12, 12), (1, 16, 7)])
def test_accumulated_gradients_are_those_of_the_whole_step(kind, sizes):
    method, expected = make(kind), whole(kind)
    x, y = batch()
    for part_x, part_y in zip(x.split(sizes), y.split(sizes), strict=True):
        (method(part_x, part_y, NUM_DATA, ROWS) / ROWS).backward()
    for name, value in gradients(method).items():
        assert (value - expected[name]).abs().max() < 1e-6, name


def test_a_new_step_has_a_new_context_also_under_accumulation():
    method = make("stfseb")
    x, y = batch()
    optimiser = torch.optim.SGD(method.parameters(), lr=1e-3)
    drawn = []
    for _ in range(2):
        for _ in range(2):
            method(x[:12], y[:12], NUM_DATA, ROWS).backward()
            drawn.append(method.context.step)
        optimiser.step()
    assert drawn == [1, 1, 2, 2]


@pytest.mark.parametrize("likelihood", [None, GaussianRegression(targets=10), StudentTRegression(targets=10)])
def test_mixed_precision_changes_the_objective_by_its_rounding_alone(likelihood):
    """bfloat16 has 8 bits: half a percent of the terms, not more; the prior's algebra stays float64."""
    x = torch.rand(32, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    y = torch.arange(32) % 10 if likelihood is None else torch.randn(32, 10, generator=torch.Generator().manual_seed(1))

    def terms(half):
        torch.manual_seed(0)
        method = STFSEB(SmallCNN(), torch.rand(60, 1, 28, 28), samples=2, likelihood=likelihood)
        method.reseed(0)
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            found = method.objective(x, y, 100)
        found.total.backward()
        return found, method.net.hidden.weight.grad

    (full, slope), (half, half_slope) = terms(False), terms(True)
    for exact, rounded in zip(full, half, strict=True):
        assert rounded.dtype == torch.float32
        torch.testing.assert_close(rounded, exact, rtol=1e-2, atol=1e-3)
    assert torch.nn.functional.cosine_similarity(slope.flatten(), half_slope.flatten(), dim=0) > 0.99


def test_masks_do_not_depend_on_the_memory_layout():
    torch.manual_seed(0)
    method = STFSEB(SmallCNN(), torch.rand(60, 1, 28, 28), samples=2)
    x = torch.rand(8, 1, 28, 28)
    before = method.sample_logits(x, 3, seed=0)
    method.net.to(memory_format=torch.channels_last)
    torch.testing.assert_close(method.sample_logits(x, 3, seed=0), before, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(not COMPILER, reason="torch.compile needs a C++ compiler and Python's headers")
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("what", ["net", "objective"])
@pytest.mark.parametrize("rate", [0.0, 0.25])
def test_compilation_changes_the_objective_by_its_rounding_alone(what, rate):
    x, y = batch()

    def terms(compiled):
        torch.compiler.reset()
        torch.manual_seed(0)
        net = MLP(5, 3, hidden=(16,), dropout=rate)
        net = torch.compile(net) if compiled and what == "net" else net
        method = STFSEB(net, torch.randn(50, 5), samples=2, prior_weight=1.0)
        method.reseed(0)
        objective = torch.compile(method.objective) if compiled and what == "objective" else method.objective
        torch.manual_seed(1)
        found = objective(x, y, NUM_DATA)
        found.total.backward()
        return found, [p.grad for p in method.parameters()]

    eager, compiled = terms(False), terms(True)
    for expected, found in zip(eager, compiled, strict=True):
        for a, b in zip(expected, found, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)
