"""Inputs that a network does not take are named in one line, with their shape and, where it is known, the remedy."""

import pytest
import torch
from torch import nn

from stfseb import GFSVI, MAP, MFVI, MCDropout, SmallCNN, StfsebError, evaluate, fit
from stfseb.likelihoods import Binary, MultiLabel
from stfseb.methods.ensemble import Ensemble
from stfseb.methods.memory import NoMemoryError
from stfseb.methods.predictor import Predictor


def colour():
    torch.manual_seed(0)
    return SmallCNN(in_channels=3)


MAKE = {
    "map": lambda: MAP(colour()),
    "mcdropout": lambda: MCDropout(colour(), samples=2),
    "mfvi": lambda: MFVI(colour(), samples=2),
    "gfsvi": lambda: GFSVI(colour(), context=torch.rand(40, 3, 28, 28), samples=2),
    "ensemble": lambda: Ensemble.of(lambda _: MAP(SmallCNN(in_channels=3)), 2),
}
WRONG = [
    ((4, 1, 28, 28), "give examples of the shape that it takes"),
    ((3, 28, 28), r"for one example give x\[None\]"),
    ((4, 28, 28, 3), r"give x.movedim\(-1, 1\)"),
]


@pytest.mark.parametrize(("shape", "remedy"), WRONG)
@pytest.mark.parametrize("name", MAKE)
def test_images_of_another_shape_are_named(name, shape, remedy):
    method = MAKE[name]()
    named = r"^x of shape \(" + ", ".join(map(str, shape)) + r"\) does not fit the network \(.*\): " + remedy
    for predict in (method.sample_logits, method.predict_proba):
        with pytest.raises(StfsebError, match=named) as caught:
            predict(torch.zeros(shape, dtype=torch.uint8))
        assert "\n" not in str(caught.value)
    assert method.predict_proba(torch.zeros(2, 3, 28, 28)).shape == (2, 10)  # and the method is as it was


def test_grey_images_without_channels_are_named():
    with pytest.raises(StfsebError, match=r"\(5, 28, 28\) does not fit .*: give x\[:, None\]"):
        MCDropout(SmallCNN()).predict_proba(torch.zeros(5, 28, 28))


def test_fit_names_them_alike():
    y = torch.arange(8) % 3
    with pytest.raises(StfsebError, match=r"^train x of shape \(8, 28, 28, 3\) does not fit .*: give x.movedim"):
        fit(MAP(colour()), (torch.zeros(8, 28, 28, 3), y), (torch.zeros(8, 3, 28, 28), y), progress=False)


def test_errors_that_are_not_of_the_shape_stay_what_they_were():
    class Crowded(nn.Module):
        """Fails for many rows, as a network does that memory is too small for."""

        def __init__(self):
            super().__init__()
            self.last = nn.Linear(3, 2)

        def forward(self, x):
            if len(x) > 2:
                raise RuntimeError("no room")
            return self.last(x)

    class Full(Crowded):
        def forward(self, x):
            raise torch.OutOfMemoryError("no room at all")

    with pytest.raises(RuntimeError, match=r"^no room$"):
        MAP(Crowded()).sample_logits(torch.zeros(5, 3))
    with pytest.raises(NoMemoryError, match=r"^1 row with 1 sample does not fit into memory: ") as caught:
        MAP(Full()).sample_logits(torch.zeros(5, 3))
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert str(caught.value.__cause__) == "no room at all"


@pytest.mark.parametrize("seed", ["x", 1.5, True, 2**64])
def test_seeds_that_are_none_are_named(seed):
    method, x = MCDropout(colour()), torch.zeros(2, 3, 28, 28)
    for call in (lambda: Predictor(method, x, 2, seed=seed), lambda: method.predict_proba(x, seed=seed)):
        with pytest.raises(StfsebError, match=r"^seed=.*: must be a whole number"):
            call()


@pytest.mark.parametrize("name", ["map", "mcdropout"])
def test_an_example_without_the_batch_dimension_is_named(name):
    method, x = MAKE[name](), torch.zeros(2, 3, 28, 28)
    with pytest.raises(StfsebError, match=r"^example of shape \(3, 28, 28\) .*: for one example give example\[None\]"):
        Predictor(method, x[0], 2)
    assert Predictor(method, x[0][None], 2).predict_proba(x).shape == (2, 10)


@pytest.mark.parametrize(
    ("y", "sizes", "named"),
    [
        (torch.full((6,), 0.7), {}, r"labels must be integers of shape \(N,\), not torch.float32 \(6,\)"),
        (torch.eye(3, dtype=torch.int64)[[0, 1, 2, 0, 1, 2]], {}, r"not torch.int64 \(6, 3\)"),
        (torch.zeros(5, dtype=torch.int64), {}, "6 examples have 5 targets"),
        (torch.zeros(6, dtype=torch.int64), {"num_data": 0}, "num_data=0"),
        (torch.zeros(6, dtype=torch.int64), {"batch_size": 3}, "batch_size=3 is less than the 6 examples"),
    ],
)
def test_targets_that_cannot_be_are_named_in_a_loop_of_ones_own(y, sizes, named):
    method = MCDropout(nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 3)), samples=2)
    with pytest.raises(StfsebError, match=named):
        method.objective(torch.rand(6, 2), y, **{"num_data": 6, **sizes})


@pytest.mark.parametrize(
    ("likelihood", "outputs", "bad", "named"),
    [
        (None, 3, -100, r"label -100 is outside the network's 3 classes \(0 to 2\)"),
        (None, 3, 7, "label 7 is outside the network's 3 classes"),
        (Binary(), 1, -1, "label -1 is outside the network's 2 classes"),
        (MultiLabel(), 1, 7, r"label 7: give 1 \(yes\), 0 \(no\) or -1"),
    ],
)
def test_a_label_that_cannot_be_is_named_in_a_loop_of_ones_own(likelihood, outputs, bad, named):
    """torch leaves rows of label -100 out without a word, and ends in an IndexError at others."""
    method = MAP(nn.Linear(2, outputs), likelihood=likelihood)
    y = torch.tensor([0, 0, bad, 0])
    with pytest.raises(StfsebError, match=f"^{named}"):
        method.objective(torch.rand(4, 2), y[:, None] if isinstance(likelihood, MultiLabel) else y, 4)


def test_labels_a_row_are_asked_for_where_there_are_several():
    method = MAP(nn.Linear(2, 3), likelihood=MultiLabel())
    with pytest.raises(StfsebError, match=r"labels of shape \(6,\) do not fit: give \(N, L\)"):
        method.objective(torch.rand(6, 2), torch.ones(6), num_data=6)
    method.objective(torch.rand(6, 2), torch.ones(6, 3), num_data=6)  # yes-or-no labels may be floating point


def test_yes_and_no_may_be_booleans_everywhere():
    torch.manual_seed(0)
    x = torch.randn(40, 2)
    y = x[:, 0] > 0
    method = MAP(nn.Linear(2, 1), likelihood=Binary())
    fit(method, (x, y), (x, y), epochs=1, progress=False)
    assert method.objective(x, y, 40).data == method.objective(x, y.long(), 40).data
    assert evaluate(method, (x, y)) == evaluate(method, (x, y.long()))
