"""A prior that cannot be factorised says so, with its settings: no learning rate is at fault."""

import pytest
import torch
from torch import nn

from stfseb import FSEB, STFSEB, fit
from stfseb.errors import DivergedError
from stfseb.methods.function_term import prior_failure
from stfseb.training.loop import Terms, Training

WORDS = r"tau1=100, tau2=1e-06 has a condition number of about \d\.\de\+3\d.*lower tau1"


def made(cls=STFSEB, size=1e12, **settings):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    return cls(net, size * torch.ones(64, 8), tau1=100.0, tau2=1e-6, samples=1, extractor=lambda x: x, **settings)


@pytest.fixture
def data():
    return torch.rand(64, 8), torch.arange(64) % 3


@pytest.mark.parametrize("cls", [STFSEB, FSEB])
def test_a_loop_of_ones_own_is_told(cls, data):
    with pytest.raises(DivergedError, match=WORDS) as caught:
        made(cls).objective(*data, 64)
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore::stfseb.ranges.RangeWarning")
def test_fit_is_told(data):
    with pytest.raises(DivergedError, match=WORDS):
        fit(made(), data, epochs=1, progress=False)


@pytest.mark.parametrize("cls", [STFSEB, FSEB])
def test_where_values_are_not_read_at_every_step_the_failure_is_looked_for_afterwards(cls):
    assert "condition number" in prior_failure(made(cls))
    assert prior_failure(made(cls, size=1.0)) == ""
    assert prior_failure(made(cls, functional_scale=0)) == ""
    nan = torch.tensor(float("nan"))
    training = Training.__new__(Training)
    training.method, training.keeper = made(cls), None
    with pytest.raises(DivergedError, match=f"data term became nan in epoch 3.*{WORDS}") as caught:
        training.check(Terms(nan, nan, nan), 3)
    assert "learning rate" not in str(caught.value)
    training.method = made(cls, size=1.0)
    with pytest.raises(DivergedError, match="lower the learning rate"):
        training.check(Terms(nan, nan, nan), 3)
