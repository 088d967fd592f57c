"""Kernels that a card, or a build of torch, cannot run."""

import sys
import types

import pytest
import torch

from stfseb.networks import card_kernels
from stfseb.networks.stacked_conv import by_kernel


@pytest.fixture
def kernels(monkeypatch):
    """Return an importable module in the place of the kernels'."""
    monkeypatch.setattr(card_kernels, "_refused", set())
    module = types.ModuleType("made_up_kernels")
    monkeypatch.setitem(sys.modules, "made_up_kernels", module)
    return module


@pytest.mark.parametrize("reason", ["OutOfResources", "CompilationError", "PTXASError"])
def test_a_card_that_cannot_run_a_kernel_is_asked_once_for_each_size(kernels, reason, caplog):
    asked = []

    def refuse(value):
        asked.append(value)
        raise type(reason, (Exception,), {})

    kernels.product = refuse
    for _ in range(2):
        assert card_kernels.on_card("made_up_kernels", "product", (16,), "a slower one", 1) is None
    assert asked == [1]
    assert caplog.text.count(f"cannot run here ({reason}): a slower one instead") == 1
    assert card_kernels.on_card("made_up_kernels", "product", (32,), "a slower one", 2) is None
    assert asked == [1, 2]


def test_a_kernel_without_instructions_on_this_card_is_not_used(kernels):
    def fail():
        raise RuntimeError("PassManager::run failed")

    kernels.product = fail
    assert card_kernels.on_card("made_up_kernels", "product", (), "a slower one") is None


def test_other_errors_are_not_hidden(kernels):
    def fail():
        raise ValueError("a bug")

    kernels.product = fail
    with pytest.raises(ValueError, match="a bug"):
        card_kernels.on_card("made_up_kernels", "product", (), "")


def test_a_kernel_that_runs_is_used(kernels):
    kernels.product = lambda a, b: a * b
    assert card_kernels.on_card("made_up_kernels", "product", (), "", 6, 7) == 42


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA build has Triton")
def test_without_triton_there_are_no_kernels(monkeypatch, caplog):
    monkeypatch.setattr(card_kernels, "_refused", set())
    monkeypatch.setitem(sys.modules, "triton", None)
    assert by_kernel("conv", torch.rand(2, 3, 8, 8, 16), torch.rand(2, 9, 16, 32), 3, 3) is None
    assert "one convolution a sample instead" in caplog.text
