"""What a loop of one's own hands to `objective`: the pixels that prediction takes, or one line that says why not."""

import pytest
import torch
from torch import nn

from stfseb import GFSVI, MAP, MCDropout, StfsebError


def make(method=MAP, **settings):
    torch.manual_seed(0)
    return method(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.0), nn.Linear(16, 3)), **settings)


@pytest.fixture
def pixels():
    return torch.randint(256, (6, 8), dtype=torch.uint8)


LABELS = torch.tensor([0, 1, 2, 0, 1, 2])


def test_training_takes_the_pixels_that_prediction_takes(pixels):
    """Whole numbers of 64 bits would be taken for features, 255 times as large as in prediction."""
    method = make()
    expected = method.objective(pixels, LABELS, 60).data
    assert method.objective(pixels / 255, LABELS, 60).data.item() == pytest.approx(expected.item())
    for x in (pixels.long(), pixels > 127):
        for call in (lambda x=x: method.objective(x, LABELS, 60), lambda x=x: method.predict_proba(x)):
            with pytest.raises(StfsebError, match=rf"^x has dtype {x.dtype}: give uint8 pixels"):
                call()


def test_training_takes_arrays(pixels):
    method = make()
    assert method.objective(pixels.numpy(), LABELS.numpy(), 60) == method.objective(pixels, LABELS, 60)
    with pytest.raises(StfsebError, match=r"^x must be a tensor or an array, not list"):
        method.objective(pixels.tolist(), LABELS, 60)
    with pytest.raises(StfsebError, match=r"^y must be a tensor or an array, not list"):
        method.objective(pixels, LABELS.tolist(), 60)
    with pytest.raises(StfsebError, match=r"^x is empty"):
        method.objective(pixels[:0], LABELS[:0], 60)


def test_the_kernel_is_prepared_from_arrays(pixels):
    fitted = []
    for x, y in ((pixels, LABELS), (pixels.numpy(), LABELS.numpy())):
        method = make(GFSVI, context=torch.rand(20, 8), num_context=4, kernel_steps=2, cache=False)
        method.prepare(x, y)
        fitted.append(method.provenance["kernel"])
    assert fitted[0] == fitted[1]


def test_fewer_data_than_a_minibatch_has_are_refused(pixels):
    """The usual slip is the number of minibatches, len(loader), by which the prior would rule."""
    method = make(MCDropout)
    named = r"^num_data=2 is less than the 6 examples of a step: give the number of examples in the data set, not"
    for sizes in ((2,), (2, 6)):
        with pytest.raises(StfsebError, match=named):
            method.objective(pixels, LABELS, *sizes)
    with pytest.raises(StfsebError, match=r"^num_data=7 is less than the 12 examples of a step"):
        method.objective(pixels, LABELS, 7, 12)
    method.objective(pixels, LABELS, 6)


@pytest.mark.parametrize("method", [MAP, MCDropout])
def test_batch_norm_of_one_row_is_named(method, pixels):
    net = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 3))
    with pytest.raises(StfsebError, match=r"^batch norm cannot take statistics of one row .*give two at least"):
        method(net).train().objective(pixels[:1], LABELS[:1], 60)
