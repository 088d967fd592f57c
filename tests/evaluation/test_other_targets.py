"""Evaluation of regression and of labels, against numpy, scipy and scikit-learn."""

import numpy as np
import pytest
import scipy.stats
import torch
from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score
from torch import nn

from stfseb import MAP, MLP, MCDropout, StfsebError, evaluate
from stfseb.evaluation import assess
from stfseb.likelihoods import Binary, GaussianRegression, MultiLabel


class Column(nn.Module):
    """Returns its first inputs, one an output."""

    def __init__(self, outputs):
        super().__init__()
        self.outputs = outputs
        self.one = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.one * x[:, : self.outputs]


def test_regression_of_a_known_predictive():
    x = torch.randn(4000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = x[:, :2] + 0.5 * torch.randn(4000, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    method = MAP(Column(2).double(), likelihood=GaussianRegression(0.5, learn=False, targets=2))
    found = evaluate(method, (x, y), samples=1, batch_size=512)
    errors = (y - x).numpy()
    assert found["rmse"] == pytest.approx(np.sqrt((errors**2).mean()))
    assert found["nll"] == pytest.approx(-scipy.stats.norm(scale=0.5).logpdf(errors).sum(1).mean(), rel=1e-6)
    assert found["coverage95"] == pytest.approx((np.abs(errors) <= 0.5 * 1.959964).mean(), abs=1e-9)
    assert found["width95"] == pytest.approx(2 * 0.5 * 1.959964, rel=1e-6)
    assert assess(method, (x, y)).summary == {}


def test_unfamiliar_rows_by_the_spread_of_the_predictions():
    torch.manual_seed(0)
    method = MCDropout(MLP(3, 1, dropout=0.3), likelihood=GaussianRegression(0.1))
    near, far = torch.randn(300, 3), 10 * torch.randn(200, 3)
    found = evaluate(method, (near, near[:, 0]), {"far": far}, samples=20)
    scores = [method.predict_std(x, samples=20, seed=0)[:, 0].detach().numpy() for x in (near, far)]
    assert found["auroc/far"] == pytest.approx(
        roc_auc_score(np.repeat([0, 1], [300, 200]), np.concatenate(scores)), abs=1e-6
    )
    assert found["auroc/far"] > 0.9
    assert 0 <= found["fpr95/far"] < 0.5


def test_labels_against_scikit_learn():
    x = torch.randn(500, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.bernoulli(torch.sigmoid(x), generator=torch.Generator().manual_seed(1)).long()
    method = MAP(Column(3).double(), likelihood=MultiLabel())
    found = evaluate(method, (x, y), samples=1)
    probs = torch.sigmoid(x).numpy()
    assert found["acc"] == pytest.approx(((probs > 0.5) == (y.numpy() == 1)).mean())
    assert found["brier"] == pytest.approx(np.mean([brier_score_loss(y[:, k], probs[:, k]) for k in range(3)]))
    assert found["nll"] == pytest.approx(sum(log_loss(y[:, k], probs[:, k]) for k in range(3)))
    some = y.clone()
    some[::2, 0] = -1
    known = evaluate(method, (x, some), samples=1)
    right = ((probs > 0.5) == (y.numpy() == 1))[some.numpy() >= 0]
    assert known["acc"] == pytest.approx(right.mean())


def test_binary_is_evaluated_as_two_classes():
    x = torch.randn(400, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    y = torch.bernoulli(torch.sigmoid(x[:, 0]), generator=torch.Generator().manual_seed(1)).long()
    found = evaluate(MAP(Column(1).double(), likelihood=Binary()), (x, y), samples=1)
    assert found["nll"] == pytest.approx(log_loss(y, torch.sigmoid(x[:, 0])))
    assert found["acc"] == pytest.approx(float(((x[:, 0] > 0) == (y == 1)).double().mean()))
    assert found["brier"] == pytest.approx(2 * brier_score_loss(y, torch.sigmoid(x[:, 0])))


def test_targets_are_checked():
    method = MAP(Column(1), likelihood=GaussianRegression())
    with pytest.raises(StfsebError, match="floating point"):
        evaluate(method, (torch.randn(5, 1), torch.arange(5)))
    with pytest.raises(StfsebError, match="no labels"):
        evaluate(method, torch.randn(5, 1))
