"""A population goes on when one of its runs cannot begin."""

import torch
from torch import nn

from stfseb import GFSVI, MAP
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
