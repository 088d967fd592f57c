"""Exported predictors against the methods themselves: the mean, and the spread that a lost dropout would take away."""

import io
import json

import numpy as np
import pytest
import torch
from torch import nn

import stfseb
from stfseb.errors import StfsebError
from stfseb.export import export_onnx, export_program, masks_for, predictor
from stfseb.likelihoods import GaussianRegression, MultiLabel
from stfseb.methods.ensemble import Ensemble
from stfseb.methods.fs_eb import FSEB
from stfseb.methods.gfsvi import GFSVI
from stfseb.methods.mfvi import MFVI

SAMPLES, SEED = 6, 3
EXAMPLE = torch.zeros(1, 1, 28, 28)


def confident(net):
    """Make the outputs of a fresh network differ, as training does, so that its samples do too."""
    with torch.no_grad():
        list(net.parameters())[-2].mul_(20.0)
    return net


def cnn():
    return confident(stfseb.SmallCNN(hidden=16, classes=5))


@pytest.fixture
def methods(resnet):
    torch.manual_seed(0)
    return {
        "cnn": stfseb.MCDropout(cnn()),
        "resnet": stfseb.STFSEB(confident(resnet()), context="train"),
        "ensemble": Ensemble.of(lambda _: stfseb.MCDropout(cnn()), 2),
        "mfvi": MFVI(cnn(), rel_sigma_init=0.5),
        "map": stfseb.MAP(cnn()),
    }


KINDS = ("cnn", "resnet", "ensemble", "mfvi", "map")


def expected(method, x):
    return method.likelihood.class_log_probs(method.sample_logits(x, SAMPLES, seed=SEED)).exp()


def check(method, name, run):
    """Hold samples, their spread and their mean against the method at three numbers of rows."""
    generator = torch.Generator().manual_seed(1)
    for rows in (1, 7, 64):
        x = torch.rand(rows, 1, 28, 28, generator=generator)
        want = expected(method, x)
        samples, prediction = run(x)
        assert samples.shape == want.shape
        np.testing.assert_allclose(samples, want, atol=1e-4)
        np.testing.assert_allclose(prediction, want.mean(0), atol=1e-4)
        np.testing.assert_allclose(samples.std(0), want.numpy().std(0), atol=1e-4)
        if name != "map":
            assert samples.std(0).max() > 0.02  # without dropout every sample would be the same


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("masks", ["inside", "input"])
def test_program_agrees_with_the_method(methods, name, masks, tmp_path):
    method = methods[name]
    path = export_program(method, tmp_path / "model.pt2", SAMPLES, masks, seed=SEED, example=EXAMPLE)
    module = torch.export.load(path).module()
    fed = masks_for(method, SAMPLES, seed=SEED, example=EXAMPLE) if masks == "input" else {}

    def run(x):
        return [out.numpy() for out in module(x, *map(torch.from_numpy, fed.values()))]

    check(method, name, run)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("masks", ["inside", "input"])
def test_onnxruntime_agrees_with_the_method(methods, name, masks, tmp_path):
    import onnxruntime

    method = methods[name]
    path = export_onnx(method, tmp_path / "model.onnx", SAMPLES, masks, seed=SEED, example=EXAMPLE)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    fed = masks_for(method, SAMPLES, seed=SEED, example=EXAMPLE) if masks == "input" else {}
    assert [value.name for value in session.get_inputs()] == ["x", *fed]
    assert [value.name for value in session.get_outputs()] == ["samples", "prediction"]
    check(method, name, lambda x: session.run(None, {"x": x.numpy(), **fed}))
    if fed:
        other = masks_for(method, SAMPLES, seed=SEED + 1, example=EXAMPLE)
        x = np.full((2, 1, 28, 28), 0.5, np.float32)
        assert abs(session.run(None, {"x": x, **other})[0] - session.run(None, {"x": x, **fed})[0]).max() > 0.01


def test_a_lost_dropout_would_be_noticed(methods):
    """With masks of ones (what an optimiser makes of dropout) the comparison above must fail."""
    method = methods["cnn"]
    module, _ = predictor(method, SAMPLES, seed=SEED, example=EXAMPLE)
    gone = [torch.ones_like(mask) for mask in module.sampler.masks]
    with pytest.raises(AssertionError):
        check(method, "cnn", lambda x: [out.numpy() for out in module(x, *gone)])


@pytest.mark.slow
def test_no_graph_has_a_dropout_node(methods, tmp_path):
    import onnx

    for masks in ("inside", "input"):
        path = export_onnx(methods["resnet"], tmp_path / "model.onnx", SAMPLES, masks, example=EXAMPLE)
        operations = {node.op_type for node in onnx.load(path).graph.node}
        assert "Mul" in operations
        assert not {"Dropout", "RandomUniformLike", "Bernoulli"} & operations


def test_logits_regression_and_labels():
    torch.manual_seed(0)
    x = torch.rand(5, 3)
    net = stfseb.MLP(3, 2, hidden=(8,), dropout=0.5)
    for likelihood in (MultiLabel(), GaussianRegression(targets=2)):
        method = stfseb.MCDropout(net, likelihood=likelihood)
        module, _ = predictor(method, SAMPLES, seed=SEED, example=x)
        samples, prediction = module(x)
        torch.testing.assert_close(prediction, method.predict(x, SAMPLES, seed=SEED))
        torch.testing.assert_close(samples.mean(0), prediction)
        logits, prediction = predictor(method, SAMPLES, seed=SEED, example=x, values="logits")[0](x)
        torch.testing.assert_close(logits, method.sample_logits(x, SAMPLES, seed=SEED))
        torch.testing.assert_close(prediction, method.predict(x, SAMPLES, seed=SEED))


def test_temperature_is_exported_and_isotonic_maps_are_refused():
    method = stfseb.MCDropout(cnn())
    x = torch.rand(3, 1, 28, 28)
    method.calibration["probabilities"] = {"temperature": 3.0}
    module, _ = predictor(method, SAMPLES, seed=SEED, example=x)
    samples, prediction = module(x)
    torch.testing.assert_close(prediction, method.predict_proba(x, SAMPLES, seed=SEED))
    powers = samples.mean(0) ** (1 / 3)
    torch.testing.assert_close(prediction, powers / powers.sum(-1, keepdim=True))
    method.calibration["probabilities"] = {"maps": [{"from": [0.0, 1.0], "to": [0.0, 1.0]}] * 5}
    with pytest.raises(StfsebError, match="isotonic calibration is not exported"):
        predictor(method, example=x)


def test_the_method_is_left_as_it_was():
    context = torch.rand(40, 1, 28, 28)
    method = stfseb.STFSEB(cnn(), context=context).train()
    before = {name: value.clone() for name, value in method.state_dict().items()}
    predictor(method, 2, example=EXAMPLE)
    assert method.training
    assert method.context is not None
    assert all(torch.equal(value, before[name]) for name, value in method.state_dict().items())


def test_what_cannot_be_exported_is_said_in_one_line(tmp_path):
    method = stfseb.MCDropout(cnn())
    with pytest.raises(StfsebError, match="give example=x"):
        export_program(method, tmp_path / "m.pt2")
    with pytest.raises(StfsebError, match="unknown masks 'outside'"):
        export_program(method, tmp_path / "m.pt2", masks="outside", example=EXAMPLE)
    with pytest.raises(StfsebError, match="samples=0"):
        export_program(method, tmp_path / "m.pt2", 0, example=EXAMPLE)
    linearised = GFSVI(cnn(), context=torch.rand(40, 1, 28, 28), prediction="linearised")
    with pytest.raises(StfsebError, match="use prediction='network'"):
        predictor(linearised, example=EXAMPLE)

    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.out = nn.Dropout(0.5), nn.Linear(4, 2)

        def forward(self, x):
            return self.out(self.drop(x)) if x.sum() > 0 else self.out(x)

    with pytest.raises(StfsebError, match=r"torch.export cannot follow Branching"):
        export_program(stfseb.MCDropout(Branching()), tmp_path / "m.pt2", example=torch.ones(2, 4))
    assert list(tmp_path.iterdir()) == []


def test_map_form_of_fseb_and_gfsvi_on_the_network():
    x = torch.rand(3, 1, 28, 28)
    context = torch.rand(40, 1, 28, 28)
    for method in (FSEB(cnn(), context=context, variant="map"), GFSVI(cnn(), context=context)):
        module, _ = predictor(method, SAMPLES, seed=SEED, example=x)
        torch.testing.assert_close(module(x)[0], expected(method, x))


def test_command_writes_what_a_saved_model_says(tmp_path):
    from typer.testing import CliRunner

    from stfseb.cli import app

    method = stfseb.MCDropout(cnn())
    method.provenance = {"input": [1, 28, 28], "class_names": list("abcde")}
    stfseb.save(method, tmp_path / "model")
    target = tmp_path / "model.pt2"
    result = CliRunner().invoke(app, ["export", str(tmp_path / "model"), "--program", str(target), "--samples", "2"])
    assert result.exit_code == 0, result.output
    extra = {"stfseb.json": ""}
    loaded = torch.export.load(io.BytesIO(target.read_bytes()), extra_files=extra).module()
    about = json.loads(extra["stfseb.json"])
    assert about["class_names"] == list("abcde")
    assert about["samples"] == 2
    assert loaded(torch.rand(9, 1, 28, 28))[0].shape == (2, 9, 5)
    nothing = CliRunner().invoke(app, ["export", str(tmp_path / "model")])
    assert isinstance(nothing.exception, StfsebError)


@pytest.mark.slow
def test_command_writes_onnx(tmp_path):
    import onnx
    from typer.testing import CliRunner

    from stfseb.cli import app

    method = stfseb.MCDropout(cnn())
    method.provenance = {"input": [1, 28, 28], "class_names": list("abcde")}
    stfseb.save(method, tmp_path / "model")
    target = tmp_path / "model.onnx"
    result = CliRunner().invoke(app, ["export", str(tmp_path / "model"), "--onnx", str(target)])
    assert result.exit_code == 0, result.output
    about = json.loads(next(p.value for p in onnx.load(target).metadata_props if p.key == "stfseb"))
    assert about["samples"] == 10
    assert about["seed"] == 0


def test_as_many_samples_as_the_thresholds_that_go_along():
    from stfseb.export import _exported, predictor

    torch.manual_seed(0)
    method = stfseb.MCDropout(cnn(), samples=2)
    x = torch.rand(40, 1, 28, 28)
    method.ood_threshold(0.1, x, samples=6)
    _, about = _exported(method, None, "inside", 0, x, "probabilities")
    assert about["samples"] == 6
    module, _ = predictor(method, example=x)
    samples, prediction = module(x)
    assert len(samples) == 6
    torch.testing.assert_close(prediction, method.decide(x).prediction)


def test_samples_that_are_all_the_same_are_exported_once():
    from stfseb.export import predictor

    method = stfseb.MAP(cnn())
    x = torch.rand(40, 1, 28, 28)
    method.ood_threshold(0.1, x, samples=6)
    assert len(predictor(method, example=x)[0](x)[0]) == 1
