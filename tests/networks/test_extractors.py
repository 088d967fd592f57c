"""The extractor by He's rule: the sizes that the rule promises, and what stays as it was."""

import math

import pytest
import torch
from torch import nn

from stfseb import FSEB, STFSEB, SmallCNN, StfsebError
from stfseb.data.tasks import load_task
from stfseb.methods.context import Context
from stfseb.networks.features import he_initialised
from stfseb.networks.precision import running


@pytest.fixture(scope="module")
def garments():
    return load_task("mini").load().train.take(slice(0, 1000)).images


def features(extractor, images, seed=0):
    torch.manual_seed(seed)
    return Context(SmallCNN(), images, 32, extractor, seed=seed).features(torch.zeros(()))


def test_sizes_of_features_on_fashion_mnist(garments):
    """He's features are about 140 times as large, squared, as torch's: tau1 does not carry over."""
    sizes = {}
    for extractor in ("init", "independent", "he"):
        found = [features(extractor, garments, seed).square().sum(1).mean().item() for seed in range(6)]
        sizes[extractor] = math.exp(sum(map(math.log, found)) / len(found))  # draws differ by a factor of three
    assert sizes["he"] / sizes["independent"] == pytest.approx(140, rel=0.35)
    assert sizes["he"] / sizes["init"] == pytest.approx(140, rel=0.35)
    assert 0.15 < sizes["init"] < 1.0


def test_singular_values_are_one_large_and_a_tail(garments):
    he, default = (torch.linalg.svdvals(features(e, garments)[:32].double()) for e in ("he", "independent"))
    for values in (he, default):
        assert values[0] > 3 * values[1] > 12 * values.median() / 2
    assert (he[0] / default[0]).item() == pytest.approx(12, rel=0.35)
    assert (he.median() / default.median()).item() == pytest.approx(14.7, rel=0.35)


def test_weights_follow_the_rule_and_biases_are_zero():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(4, 64, 3, groups=2), nn.BatchNorm2d(64), nn.Flatten(), nn.Linear(400, 300)).double()
    before = [p.clone() for p in net.parameters()]
    state = torch.get_rng_state()
    fresh = he_initialised(net, 1)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), before, strict=True))
    assert fresh[0].weight.std().item() == pytest.approx(math.sqrt(2 / 18), rel=0.05)
    assert fresh[3].weight.std().item() == pytest.approx(math.sqrt(2 / 400), rel=0.02)
    assert fresh[3].weight.dtype == torch.float64
    assert not fresh[0].bias.any()
    assert not fresh[3].bias.any()
    assert torch.equal(fresh[1].weight, torch.ones(64, dtype=torch.float64))
    assert torch.equal(he_initialised(net, 1)[3].weight, fresh[3].weight)
    assert not torch.equal(he_initialised(net, 2)[3].weight, fresh[3].weight)


def test_the_method_takes_it_and_names_unknown_ones(garments):
    method = STFSEB(SmallCNN(), garments, extractor="he", normalise_features=True)
    assert method.settings.extractor == "he"
    assert method.context.features(method.like).square().sum(1).mean().item() == pytest.approx(1.0, rel=1e-4)
    with pytest.raises(StfsebError, match="he"):
        STFSEB(SmallCNN(), garments, extractor="xavier")


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_features_have_single_precision_whatever_a_step_runs_in(precision):
    seen = []

    def extract(x):
        matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv
        seen.append((torch.is_autocast_enabled("cpu"), matmul.fp32_precision, conv.fp32_precision))
        return x.flatten(1)

    method = STFSEB(SmallCNN(), torch.rand(40, 1, 28, 28), extractor=extract)
    with running(precision, torch.device("cpu")):
        method.context.features(method.like)
    assert set(seen) == {(False, "ieee", "ieee")}


def test_pretrained_is_the_network_as_it_was_given(garments):
    torch.testing.assert_close(features("pretrained", garments[:40]), features("init", garments[:40]), rtol=0, atol=0)


@pytest.mark.parametrize("cls", [STFSEB, FSEB])
@pytest.mark.parametrize("extractor", [None, 3])
def test_what_extracts_nothing_is_refused_at_once(cls, extractor, garments):
    with pytest.raises(StfsebError, match=rf"extractor={extractor}: give 'init', 'pretrained'.* or a callable"):
        cls(SmallCNN(), garments, extractor=extractor)
