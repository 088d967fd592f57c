"""A population goes on when one of its runs cannot begin."""

import pytest
import torch
from torch import nn

from stfseb import GFSVI, MAP
from stfseb.errors import StfsebError
from stfseb.training import population
from stfseb.training.population import Member, fit_population


def make(kernel_lr):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(9, 3))
    context = torch.rand(40, 1, 3, 3)
    return GFSVI(net, context, num_context=4, samples=2, kernel_steps=5, kernel_lr=kernel_lr)


def test_a_kernel_fit_that_diverges_ends_its_own_run_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("STFSEB_CACHE", str(tmp_path))
    torch.manual_seed(0)
    x, y = torch.rand(60, 1, 3, 3), torch.arange(60) % 3
    wild = Member("wild", lambda: make(1e6))
    members = [
        wild,
        Member("tame", lambda: make(0.01)),
        wild,
        Member("map", lambda: MAP(nn.Sequential(nn.Flatten(), nn.Linear(9, 3)))),
        wild,
    ]
    ends = list(fit_population(members, (x, y), (x, y), epochs=2, batch_size=20))
    assert [o.member.name for o in ends] == ["wild", "tame", "wild", "map", "wild"]
    for end in ends:
        assert (end.result is None) == (end.member.name == "wild")
        assert end.error.startswith("the fit of the matern52 kernel diverged") == (end.member.name == "wild")


def test_a_population_of_runs_that_all_fail_ends():
    x, y = torch.rand(60, 1, 3, 3), torch.arange(60) % 3
    ends = list(fit_population([Member(str(i), lambda: make(1e6)) for i in range(3)], (x, y), (x, y), epochs=2))
    assert [o.result for o in ends] == [None] * 3


def test_data_that_do_not_fit_are_refused_in_words(monkeypatch):
    x, y = torch.rand(60, 9), torch.arange(60) % 3
    asked = []
    monkeypatch.setattr(population, "fits", lambda parts, device: asked.append([len(p) for p in parts]))
    with pytest.raises(StfsebError, match=r"do not fit into the memory of cpu.*one by one with fit"):
        list(fit_population([Member("", lambda: MAP(nn.Linear(9, 3)))], (x, y), (x[:20], y[:20]), epochs=1))
    assert asked == [[60, 60, 20, 20]]


@pytest.mark.parametrize("made", [MAP(nn.Linear(2, 3)), "map"])
def test_a_member_without_a_function_is_refused_in_words(made):
    """A method may be called too, as any module: the error would come from its forward pass."""
    with pytest.raises(StfsebError, match=f"'first' is of type {type(made).__name__}: give a function"):
        Member("first", made)
