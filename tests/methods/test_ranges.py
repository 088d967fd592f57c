"""Inputs on another scale than training's are told; those that are merely standardised, wide or unfamiliar are not."""

import json
import warnings

import numpy as np
import pytest
import torch

from stfseb import MAP, MLP, Ensemble, MCDropout, Predictor, SmallCNN, evaluate, fit, fit_population, load, save
from stfseb.inputs import check_pixels
from stfseb.likelihoods import GaussianRegression
from stfseb.ranges import FAR, RangeWarning
from stfseb.training.population import Member

PIXELS = torch.randint(0, 256, (40, 1, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
UNIT = PIXELS.float() / 255
LABELS = torch.arange(40) % 10


def fitted(x, **more):
    torch.manual_seed(0)
    method = MCDropout(SmallCNN(), samples=2)
    fit(method, (x, LABELS), (x[:20], LABELS[:20]), epochs=1, progress=False, **more)
    return method


@pytest.mark.parametrize("trained_on", [PIXELS, UNIT], ids=["uint8", "unit"])
def test_pixels_to_255_as_floats_are_told_with_the_remedy(trained_on):
    method = fitted(trained_on)
    said = r"x has values from 0 to 255, but training saw 0 to 1: divide by 255, or give uint8, which is scaled"
    with pytest.warns(RangeWarning, match=said) as told:
        method.predict_proba(PIXELS.float())
    assert len(told) == 1
    method.predict_proba(PIXELS.float())  # told once: warnings are errors here
    method.predict_proba(UNIT)
    method.predict_proba(PIXELS)


def test_every_way_of_predicting_tells():
    method = fitted(UNIT)
    wrong = PIXELS.float()
    ways = {
        "sample_logits": lambda: method.sample_logits(wrong),
        "decide": lambda: method.judged(wrong),
        "array": lambda: method.predict_proba(wrong.numpy()),
        "predictor": lambda: predictor.predict_proba(wrong),
        "chunks": lambda: method.predict_proba(wrong, batch_size=3),
    }
    predictor = Predictor(method, UNIT, batch_size=16)
    for way in ways.values():
        method.seen.learn(method.seen.span)  # forget what was told
        with pytest.warns(RangeWarning, match="x has values from 0 to 255") as told:
            way()
        assert len(told) == 1


def test_evaluate_names_the_split():
    method = fitted(UNIT)
    with pytest.warns(RangeWarning) as told:
        evaluate(method, (UNIT, LABELS), {"other": PIXELS.float() + 0.5}, samples=2, batch_size=7)
    assert [str(w.message).partition(" has ")[0] for w in told] == ["ood 'other'"]
    with pytest.warns(RangeWarning, match="^test has values from 0 to 255"):
        evaluate(method, (PIXELS.float(), LABELS), samples=2)


def test_a_saved_model_remembers_and_an_older_one_is_silent(tmp_path):
    folder = save(fitted(UNIT), tmp_path / "model")
    with pytest.warns(RangeWarning, match="training saw 0 to 1"):
        load(folder).predict_proba(PIXELS.float())
    about = json.loads((folder / "model.json").read_text())
    del about["range"]
    (folder / "model.json").write_text(json.dumps(about))
    load(folder).predict_proba(PIXELS.float())
    save(MAP(SmallCNN()), tmp_path / "untrained")
    load(tmp_path / "untrained").predict_proba(PIXELS.float())


def test_uint8_after_training_on_floats_to_255():
    method = fitted(PIXELS.float())
    with pytest.warns(
        RangeWarning, match="uint8 pixels, which become 0 to 1, but training saw 0 to 255: give floating"
    ):
        method.predict_proba(PIXELS)


@pytest.mark.parametrize("split", ["validation", "context"])
def test_fit_compares_validation_and_context_with_train(split):
    from stfseb import STFSEB

    torch.manual_seed(0)
    wrong = PIXELS.float()
    method = STFSEB(SmallCNN(), context=wrong if split == "context" else PIXELS, num_context=8, samples=2)
    held = wrong if split == "validation" else UNIT
    with pytest.warns(RangeWarning) as told:
        fit(method, (UNIT, LABELS), (held, LABELS), epochs=1, progress=False)
    assert str(told[0].message).startswith(("validation x has", "context has"))
    assert split in str(told[0].message)


def test_members_of_a_population_remember():
    members = [Member("a", lambda: MAP(SmallCNN()))]
    (outcome,) = fit_population(members, (UNIT, LABELS), (UNIT, LABELS), epochs=1, precision="float32")
    assert outcome.method.seen.span == pytest.approx((0.0, 1.0))


@pytest.mark.parametrize("shift", [0.0, 3.0, -3.0])
def test_standardised_and_wide_inputs_are_not_told(shift):
    """Outliers, heavy tails and unfamiliar inputs are of training's scale."""
    generator = np.random.default_rng(0)
    for x in (
        generator.standard_normal((200, 3)),
        generator.standard_t(3, (200, 3)),
        generator.lognormal(0, 2, (200, 3)),
        generator.uniform(0, 1e6, (200, 3)),
    ):
        method = MAP(MLP(3, 1, hidden=(4,)), likelihood=GaussianRegression())
        method.seen.learn(check_pixels(torch.tensor(x), "x"))
        new = torch.tensor(x[generator.permutation(200)] * 3 + shift * x.std()).float()
        method.predict(new)
        method.predict(torch.zeros(4, 3))
        method.predict(new / 1000)


def test_the_limit_is_a_multiple_of_the_width():
    method = fitted(UNIT)
    low, high = method.seen.span
    edge = high + FAR * (high - low)
    method.predict_proba(UNIT * edge)
    with pytest.warns(RangeWarning):
        method.predict_proba(UNIT * edge * 1.01)


def test_the_check_for_nan_sees_what_it_saw():
    """One pass finds range and NaN: held against numpy, with the bad value anywhere and of any kind."""
    generator = np.random.default_rng(1)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        x = torch.tensor(generator.standard_normal((5, 4)), dtype=dtype)
        assert check_pixels(x, "x") == (float(x.double().numpy().min()), float(x.double().numpy().max()))
        for bad in (np.nan, np.inf, -np.inf):
            for place in np.ndindex(5, 4):
                broken = x.clone()
                broken[place] = bad
                with pytest.raises(ValueError, match=rf"in 1 rows \(first: row {place[0]}\)"):
                    check_pixels(broken, "x")


def test_an_untrained_method_says_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MCDropout(SmallCNN()).predict_proba(PIXELS.float(), samples=1)


def test_an_ensemble_of_trained_members_knows_their_range():
    members = [MAP(MLP(2, 2)) for _ in range(3)]
    members[0].seen.learn((0.0, 0.9))
    members[1].seen.learn((-0.1, 0.5))
    assert Ensemble(members).seen.span == (-0.1, 0.9)
    assert Ensemble([MAP(MLP(2, 2)) for _ in range(2)]).seen.span is None
