"""The predictor gives what the method gives: masks of the seed, any type of pixels, weights as they are now."""

import copy

import pytest
import torch
from torch import nn

from stfseb import GFSVI, MAP, MFVI, Ensemble, MCDropout, SmallCNN, fit
from stfseb.errors import StfsebError
from stfseb.methods.base import evaluating
from stfseb.methods.predictor import Predictor, layout
from stfseb.networks.layout import CardLayout
from stfseb.networks.precision import running


def make(samples=3):
    torch.manual_seed(0)
    return MCDropout(SmallCNN(), samples=samples)


def test_lanes_of_predictions_are_the_seeds(mini):
    method, x = make(), mini("test", 10).images
    predictor = Predictor(method, x, batch_size=4, samples=5, seed=3, precision="float32")
    assert torch.allclose(predictor.sample_logits(x), method.sample_logits(x, 5, seed=3), atol=1e-5)
    assert torch.allclose(predictor.predict_proba(x), method.predict_proba(x, 5, seed=3), atol=1e-5)
    assert method.folded.lanes is None


@pytest.mark.parametrize("cls", [MAP, MFVI])
def test_predictor_serves_methods_without_masks(mini, cls):
    torch.manual_seed(0)
    method, x = cls(SmallCNN()), mini("test", 5).images
    predictor = Predictor(method, x, 2, precision="float32")
    assert torch.allclose(predictor.predict_proba(x), method.predict_proba(x, seed=0), atol=1e-6)


def transformed(kind, x):
    """Return a method whose passes are transformed: by jvp, or by vmap, as the network is no plain chain."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2)]
    net = nn.Sequential(*layers, nn.Conv2d(32, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 12 * 12, 10))
    if kind == "linearised":
        return GFSVI(net, x, num_context=2, prediction="linearised")
    method = MFVI(net, vectorise=True)
    return Ensemble([method, copy.deepcopy(method)]) if kind == "ensemble" else method


@pytest.mark.parametrize("kind", ["linearised", "vectorised", "ensemble"])
def test_the_card_s_layout_is_not_for_passes_that_are_transformed(mini, kind):
    """jvp and vmap refuse it. What would be chosen on the card is run here, on the CPU."""
    x, card = mini("test", 3).images.float() / 255, torch.device("cuda")
    method = transformed(kind, x)
    exact = method.sample_logits(x, 2, seed=1)
    with torch.no_grad(), evaluating(method.net), running("bf16", x.device), layout(method, "bf16", card):
        found = method._draw(x, 2, 1).float()
    assert torch.allclose(found, exact, atol=0.05 * float(exact.abs().max()))
    assert isinstance(layout(make(), "bf16", card), CardLayout)
    assert not isinstance(layout(make(), "bf16", x.device), CardLayout)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["linearised", "vectorised", "ensemble"])
def test_transformed_passes_are_predicted_in_bf16_on_the_card(images, kind):
    method = transformed(kind, images[0]).to("cuda")
    found = Predictor(method, images[0], 128, 2, seed=1, precision="bf16").sample_logits(images[0]).float()
    exact = method.sample_logits(images[0], 2, seed=1)
    assert torch.allclose(found, exact, atol=0.05 * float(exact.abs().max()))


@pytest.mark.parametrize("example", ["uint8", "float"])
def test_pixels_of_either_type_whatever_the_example_was(mini, example):
    method, x = make(), mini("test", 6).images
    floats = x.float() / 255
    predictor = Predictor(method, x if example == "uint8" else floats, 4, seed=1, precision="float32")
    expected = method.predict_proba(x, seed=1)
    assert torch.allclose(predictor.predict_proba(x), expected, atol=1e-6)
    assert torch.allclose(predictor.predict_proba(floats), expected, atol=1e-6)
    assert torch.allclose(predictor.predict_proba(floats.double().numpy()), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda x: x.float() * float("nan"), "x has NaN or infinite values in 6 rows"),
        (lambda x: x[:, :, :14], r"x has rows of shape \(1, 14, 28\), the example had \(1, 28, 28\): give that shape"),
        (lambda x: x[:0], "x is empty"),
        (lambda x: x.long(), "x has dtype torch.int64"),
    ],
)
def test_what_cannot_be_predicted_is_named(mini, spoil, message):
    x = mini("test", 6).images
    with pytest.raises(StfsebError, match=message):
        Predictor(make(), x, 4).predict_proba(spoil(x))


def striped(count):
    """Return images whose stripe tells the class, which a few steps learn."""
    g = torch.Generator().manual_seed(1)
    y = torch.randint(10, (count,), generator=g)
    x = torch.randint(120, (count, 1, 28, 28), generator=g, dtype=torch.uint8)
    for image, label in zip(x, y.tolist(), strict=True):
        image[0, 2 * label : 2 * label + 4] += 100
    return x, y


@pytest.fixture
def images():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return striped(512)


@pytest.mark.gpu
def test_captured_prediction_is_the_eager_one(images):
    method = make().to("cuda")
    predictor = Predictor(method, images[0], 128, 10, seed=2, precision="float32")
    eager = method.sample_logits(images[0], 10, seed=2)
    assert torch.allclose(predictor.sample_logits(images[0]), eager, atol=2e-3)


@pytest.mark.gpu
def test_captured_prediction_sees_weights_that_were_trained_on(images):
    """Training may lay weights out anew (channels last): a graph would go on reading where they were."""
    method = make().to("cuda")
    predictor = Predictor(method, images[0], 128, 10, seed=2, precision="float32")
    before = predictor.predict_proba(images[0])
    fit(method, images, images, epochs=3, lr=2e-3, device="cuda", capture=True, progress=False)
    after = method.predict_proba(images[0], 10, seed=2)
    assert (before - after).abs().max() > 0.2
    assert torch.allclose(predictor.predict_proba(images[0]), after, atol=5e-3)


@pytest.mark.gpu
def test_captured_prediction_outlives_other_captures(images):
    """Captures clear the workspaces of matrix products: a graph that had taken one from there would lose it."""
    predictor = Predictor(make().to("cuda"), images[0], 128, 10, seed=2, precision="float32")
    before = predictor.predict_proba(images[0])
    fit(make().to("cuda"), images, images, epochs=1, capture=True, progress=False)
    torch.cuda.empty_cache()
    junk = torch.full((2**28,), float("nan"), device="cuda")  # where freed memory was
    assert torch.allclose(predictor.predict_proba(images[0]), before, atol=1e-6)
    assert bool(junk.isnan().all())  # and nothing wrote there
