"""dof and strength: what a dof does near zero in each parametrisation, and that the two priors have their own."""

import math

import pytest
import torch
from torch import nn

from stfseb import STFSEB

# (nu + N_c)/(nu - 2) at N_c = 32: how many times stronger than the Gaussian the paper's form pulls near zero.
STRENGTH = {2.1: 341, 3.0: 35, 5.0: 12.3, 10.0: 5.25, 20.0: 2.89, math.inf: 1}


def function_term(size, dof, parametrisation, **settings):
    """Return the function term of outputs of about the given size at 32 context points."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 3)).double()
    with torch.no_grad():
        net[3].weight *= size
        net[3].bias *= size
    context = torch.randn(32, 5, dtype=torch.float64)
    method = STFSEB(net, context, dof, samples=1, prior_weight=1.0, parametrisation=parametrisation, **settings)
    return method.objective(context[:4], torch.zeros(4, dtype=torch.int64), 100).function.item()


@pytest.mark.parametrize(("dof", "factor"), STRENGTH.items())
def test_the_papers_form_confounds_dof_and_strength_and_the_matched_one_does_not(dof, factor):
    gaussian = function_term(1e-3, math.inf, "covariance")
    assert function_term(1e-3, dof, "covariance") / gaussian == pytest.approx(factor, rel=5e-3)
    assert function_term(1e-3, dof, "curvature") / gaussian == pytest.approx(1.0, rel=1e-3)
    if math.isfinite(dof):
        assert function_term(1e-3, dof, "scale") / gaussian == pytest.approx((dof + 32) / dof, rel=1e-3)


def test_matched_tails_still_give_way():
    """Far out, a smaller dof costs less: what is left of the dof once its strength is taken away."""
    costs = [function_term(1e4, dof, "curvature") for dof in (2.1, 5.0, 20.0, 100.0, math.inf)]
    assert costs == sorted(costs)
    assert costs[-1] > 100 * costs[0]


@pytest.mark.parametrize("parametrisation", ["covariance", "curvature"])
def test_the_function_prior_has_a_dof_of_its_own(parametrisation):
    tied = function_term(1e-3, 3.0, parametrisation)
    assert function_term(1e-3, 20.0, parametrisation, dof_function=3.0) == tied
    assert function_term(1e-3, 3.0, parametrisation, dof_weights=20.0) == tied
    assert function_term(1e-3, 20.0, parametrisation) != tied
