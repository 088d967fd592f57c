"""The predictor gives what the method gives: masks of the seed, any type of pixels, weights as they are now."""

import pytest
import torch

from stfseb import MAP, MFVI, MCDropout, SmallCNN, fit
from stfseb.errors import StfsebError
from stfseb.methods.predictor import Predictor


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
