"""The search spaces hold the paper's grid, and every value in them can be used."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from stfseb.errors import StfsebError
from stfseb.methods.registry import method_class
from stfseb.methods.search_spaces import SPACES, search_space, suggest


def test_the_paper_s_grid():
    space = search_space("stfseb")
    assert space["dof"] == (2.1, 3.0, 5.0, 10.0, 20.0)
    assert space["sigma"] == (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
    assert space["tau1"] == space["tau2"] == (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
    assert (
        search_space("map")
        == search_space("mfvi")
        == search_space("mcdropout")
        == {"sigma": (1e-3, 1e-2, 1e-1, 1.0, 10.0)}
    )


def test_the_extended_grid_goes_to_1e4_in_half_decades():
    for key in ("stfseb", "fseb"):
        space = search_space(key, "extended")
        for name in ("tau1", "tau2"):
            assert space[name][-5:] == (100.0, 300.0, 1000.0, 3000.0, 10000.0)
            assert 0.01 in space[name]
        assert space["sigma"] == (0.1, 0.3, 1.0, 3.0, 10.0)
    scales = search_space("map", "extended")["sigma"]
    assert (len(scales), scales[0], scales[-1]) == (19, 0.01, 10.0)
    assert list(scales) == sorted(set(scales))


@pytest.mark.parametrize(("which", "key"), [(w, k) for w, spaces in SPACES.items() for k in spaces])
def test_every_value_is_a_setting_the_method_takes(which, key):
    space = search_space(key, which)
    kind = method_class(key)
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), nn.Linear(4, 2))
    context = {"context": torch.rand(40, 3)} if key not in ("map", "mfvi", "mcdropout") else {}
    for values in itertools.zip_longest(*space.values()):
        settings = {name: value for name, value in zip(space, values, strict=True) if value is not None}
        method = kind(net, **context, **settings)
        for name, value in settings.items():
            assert getattr(method.settings, name) == value


def test_a_trial_draws_from_the_choices():
    class Last:
        def suggest_categorical(self, name, choices):
            return choices[-1]

    assert suggest(Last(), "gfsvi") == {"kernel": "rbf", "a_eps": 0.1, "gamma": 1e-4}


def test_unknown_names():
    with pytest.raises(StfsebError, match="unknown method 'stfse': did you mean 'stfseb'"):
        search_space("stfse")
    with pytest.raises(StfsebError, match="unknown search space 'papers'"):
        search_space("map", "papers")
