import numpy as np
import pytest
import torch
from torch import nn

from stfseb import MAP, STFSEB, MCDropout, SmallCNN, StfsebError
from stfseb.evaluation.calibration import raw_outputs
from stfseb.methods import base
from stfseb.methods.memory import sized


@pytest.fixture(scope="module")
def method():
    torch.manual_seed(0)
    return MCDropout(SmallCNN(), samples=4)


def test_shapes_and_averaging(method):
    x = torch.rand(6, 1, 28, 28)
    logits = method.sample_logits(x, 7, seed=1)
    assert logits.shape == (7, 6, 10)
    assert torch.allclose(method.predict_proba(x, 7, seed=1), logits.softmax(-1).mean(0), atol=1e-6)
    assert method.predict_proba(x).shape == (6, 10)
    assert not torch.allclose(logits[0], logits[1])


def test_predictions_do_not_depend_on_grouping_or_order(method):
    x = torch.rand(9, 1, 28, 28)
    whole = method.predict_proba(x, seed=3)
    assert torch.allclose(whole, method.predict_proba(x, seed=3, batch_size=2), atol=1e-6)
    assert torch.allclose(whole.flip(0), method.predict_proba(x.flip(0), seed=3), atol=1e-6)
    one_by_one = torch.cat([method.predict_proba(row[None], seed=3) for row in x])
    assert torch.allclose(whole, one_by_one, atol=1e-6)


def test_the_default_generator_rules_when_there_is_no_seed(method):
    x = torch.rand(3, 1, 28, 28)
    torch.manual_seed(4)
    a = method.predict_proba(x)
    torch.manual_seed(4)
    assert torch.equal(a, method.predict_proba(x))
    assert not torch.equal(a, method.predict_proba(x))


def test_bytes_and_fractions_mean_the_same(method):
    x = torch.randint(256, (3, 1, 28, 28), dtype=torch.uint8)
    assert torch.allclose(method.predict_proba(x, seed=0), method.predict_proba(x / 255, seed=0), atol=1e-6)
    assert torch.allclose(method.predict_proba(x.numpy(), seed=0), method.predict_proba(x, seed=0))


def test_modes_are_given_back():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    method = MCDropout(net)
    net.train()
    net[2].eval()
    before = net[1].running_mean.clone()
    method.predict_proba(torch.rand(5, 3))
    assert [m.training for m in net] == [True, True, False, True]
    assert torch.equal(before, net[1].running_mean)


def test_map_is_one_function():
    logits = MAP(SmallCNN()).sample_logits(torch.rand(2, 1, 28, 28), 3)
    assert logits.shape == (3, 2, 10)
    assert torch.equal(logits[0], logits[2])


@pytest.mark.parametrize(
    ("x", "match"),
    [
        (torch.full((2, 1, 28, 28), float("nan")), "NaN"),
        (torch.zeros(0, 1, 28, 28), "empty"),
        (torch.zeros(2, 1, 28, 28, dtype=torch.int32), "int32"),
        ("image.png", "str"),
        (np.array([object()]), "objects"),
    ],
)
def test_bad_inputs_are_named(method, x, match):
    with pytest.raises(StfsebError, match=match):
        method.predict_proba(x)


def test_a_network_must_return_logits():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x):
            return self.fc(x), x

    with pytest.raises(StfsebError, match="logits"):
        MAP(Twice()).outputs(torch.rand(2, 3))
    with pytest.raises(StfsebError, match=r"nn\.Module"):
        MAP("net")
    with pytest.raises(StfsebError, match="trainable"):
        MAP(nn.ReLU())


@pytest.mark.parametrize(("side", "most"), [(32, 4096), (64, 1024), (224, 83)])
def test_large_images_are_predicted_in_smaller_passes(side, most):
    """An image of 224 x 224 has 49 times the activations: 4,096 of them would take tens of gigabytes."""
    seen = []

    class Counting(nn.Sequential):
        def forward(self, x):
            seen.append(len(x))
            return super().forward(x)

    torch.manual_seed(0)
    method = MAP(Counting(nn.Conv2d(3, 1, 7, stride=7), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1, 2)))
    x = (
        torch.randint(0, 256, (most + 5, 3, side, side), dtype=torch.uint8)
        if side > 32
        else torch.rand(4101, 3, 32, 32)
    )
    seen.clear()
    whole = method.predict_proba(x)
    assert max(seen) == most
    assert sum(seen) == most + 5
    torch.testing.assert_close(whole[-20:], method.predict_proba(x[-20:], batch_size=3))


def test_a_pass_takes_one_row_at_least(method):
    assert method._rows(torch.empty(1, 1, 6000, 6000), 10**6) == 1
    assert method._rows(torch.empty(0, 1, 224, 224), 10) >= 1


def test_rows_of_large_images():
    assert [sized(rows, torch.empty(2, *shape)) for rows, shape in ((128, (1, 28, 28)), (128, (3, 224, 224)))] == [
        128,
        2,
    ]
    assert sized(5, torch.empty(1, 3, 4000, 4000)) == 1


def test_temperatures_and_features_are_of_smaller_passes_too():
    seen = []
    net = nn.Sequential(
        nn.Conv2d(3, 2, 7, stride=7), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(2, 2)
    )
    method = STFSEB(net, torch.rand(9, 3, 224, 224), num_context=3, samples=2)
    method.net[0].register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    raw_outputs(method, torch.rand(5, 3, 224, 224), samples=2)
    assert max(seen) == 2
    sizes = []
    given = STFSEB(
        net, torch.rand(9, 3, 224, 224), num_context=3, extractor=lambda x: sizes.append(len(x)) or x.flatten(1)[:, :4]
    )
    sizes.clear()
    given.context.extract(torch.rand(9, 3, 224, 224), torch.zeros(()))
    assert max(sizes) == 2


class Tight(nn.Sequential):
    """No more than `limit` input numbers fit."""

    limit = 24

    def forward(self, x):
        self.seen.append(len(x))
        if x.numel() > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(x)


def test_what_was_borne_holds_for_every_request_and_counts_numbers_and_samples(monkeypatch):
    net = Tight(nn.Flatten(), nn.LazyLinear(2))
    net.seen = []
    net(torch.zeros(1, 6))
    method = MAP(net)
    freed = []
    monkeypatch.setattr(base, "free_unused", lambda: freed.append(1))
    x = torch.rand(20, 6)
    whole = method.sample_logits(x[:4], 1)
    assert freed == []
    net.seen.clear()
    found = method.sample_logits(x, 1)
    torch.testing.assert_close(found[:, :4], whole)
    assert net.seen == [20, 10, 5, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2]  # the fourth size is borne
    assert len(freed) == 3
    for given in (None, 20):  # it is remembered, also where another number is asked for
        net.seen.clear()
        method.predict_proba(x, batch_size=given)
        assert set(net.seen) == {2}
    assert [method._rows(torch.empty(9, width), samples) for width, samples in ((6, 1), (6, 2), (3, 1), (1, 1))] == [
        2,
        1,
        4,
        12,
    ]


def test_a_number_of_rows_that_is_asked_for_is_taken():
    seen = []
    net = nn.Sequential(nn.Linear(3, 2))
    net[0].register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    MAP(net).predict_proba(torch.rand(9000, 3), batch_size=6000)
    assert seen == [6000, 3000]
    seen.clear()
    for given in (np.int64(2), 10**30):
        MAP(net).predict_proba(torch.rand(3, 3), batch_size=given)
    assert seen == [2, 1, 3]
