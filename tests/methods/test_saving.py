"""Saved models: the same predictions after loading, on any folder state, and clear refusals."""

import json
import math
import os

import pytest
import torch

import stfseb
from stfseb import MAP, STFSEB, MCDropout, SmallCNN, StfsebError, fit, load, save


@pytest.fixture
def model(tmp_path):
    torch.manual_seed(0)
    method = MCDropout(SmallCNN(), samples=3)
    return save(method, tmp_path / "model"), method


def test_resnet_goes_through_unchanged(resnet, mini, tmp_path):
    """A user's network: STFSEB, fit, save, load with a fresh instance, the same probabilities."""
    torch.manual_seed(0)
    method = STFSEB(resnet(), context=mini("kmnist", 64), samples=2)
    fit(method, mini("train", 128), mini("validation", 64), epochs=2, batch_size=32, progress=False)
    x = mini("test", 20).images
    before = method.predict_proba(x, samples=10, seed=5)
    torch.manual_seed(9)
    unseeded = method.predict_proba(x)
    save(method, tmp_path / "model")
    again = load(tmp_path / "model", net=resnet())
    assert isinstance(again, STFSEB)
    assert again.settings == method.settings
    assert (again.predict_proba(x, samples=10, seed=5) - before).abs().max() < 1e-6
    torch.manual_seed(9)
    assert (again.predict_proba(x) - unseeded).abs().max() < 1e-6
    with pytest.raises(StfsebError, match="net="):
        load(tmp_path / "model")
    with pytest.raises(StfsebError, match="context"):
        again.objective(x, torch.zeros(20, dtype=torch.long), 100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_built_in_networks_rebuild(tmp_path, dtype):
    x = torch.rand(4, 1, 28, 28)
    for make in (
        lambda net: MAP(net, sigma=0.3),
        lambda net: MCDropout(net, sigma=0.2, prior_weight="keep"),
        lambda net: STFSEB(net, torch.rand(40, 1, 28, 28), math.inf, tau2=3.0, parametrisation="scale"),
    ):
        method = make(SmallCNN().to(dtype))
        method.calibration["unfamiliar"] = {"threshold": 0.5}
        again = load(save(method, tmp_path / method.key))
        assert type(again) is type(method)
        assert again.settings == method.settings
        assert again.calibration == method.calibration
        assert torch.equal(again.predict_proba(x, seed=0), method.predict_proba(x, seed=0))


def test_the_folder_holds_no_pickle_and_no_images(tmp_path):
    context = torch.rand(50, 1, 28, 28)
    folder = save(STFSEB(SmallCNN(), context), tmp_path / "m")
    names = sorted(p.name for p in folder.iterdir())
    assert [n.rpartition(".")[2] for n in names] == ["json", "safetensors"]
    size = sum(p.stat().st_size for p in folder.iterdir())
    assert size < 4 * 421_642 + 20_000
    meta = json.loads((folder / "model.json").read_text())
    assert meta["context"]["count"] == 50
    assert meta["context"]["fingerprint"] == stfseb.data.images.fingerprint(context)


def test_saving_again_replaces_and_leaves_one_model(model):
    folder, method = model
    with torch.no_grad():
        method.net.output.bias.add_(1.0)
    save(method, folder)
    assert len(list(folder.iterdir())) == 2
    assert torch.equal(load(folder).net.output.bias, method.net.output.bias)


def test_a_save_that_fails_leaves_the_old_model(model, monkeypatch):
    folder, method = model
    before = load(folder).net.output.bias.clone()
    with torch.no_grad():
        method.net.output.bias.add_(1.0)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StfsebError, match="No space left on device; free some space"):
        save(method, folder)
    monkeypatch.undo()
    assert torch.equal(load(folder).net.output.bias, before)
    assert not list(folder.glob(".*"))


def test_a_missing_or_damaged_model_is_named(model, tmp_path):
    folder, _ = model
    with pytest.raises(StfsebError, match="does not exist"):
        load(tmp_path / "nothing")
    weights = next(folder.glob("*.safetensors"))
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StfsebError, match="damaged or truncated"):
        load(folder)
    weights.unlink()
    with pytest.raises(StfsebError, match="missing"):
        load(folder)
    weights.write_bytes(whole)
    text = (folder / "model.json").read_text()
    (folder / "model.json").write_text(text[:50])
    with pytest.raises(StfsebError, match="damaged"):
        load(folder)
    (folder / "model.json").write_text("[]")
    with pytest.raises(StfsebError, match="format"):
        load(folder)
    meta = json.loads(text)
    for key in ("method", "settings", "network"):
        (folder / "model.json").write_text(json.dumps({k: v for k, v in meta.items() if k != key}))
        with pytest.raises(StfsebError, match=key):
            load(folder)


def test_newer_formats_are_refused_by_name(model):
    folder, _ = model
    meta = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps({**meta, "format": 99}))
    with pytest.raises(StfsebError, match=r"format 99.*upgrade"):
        load(folder)


def test_weights_file_cannot_point_elsewhere(model):
    folder, _ = model
    meta = json.loads((folder / "model.json").read_text())
    meta["weights"]["file"] = "../secret.safetensors"
    (folder / "model.json").write_text(json.dumps(meta))
    with pytest.raises(StfsebError, match="missing"):
        load(folder)


def test_another_network_is_refused(tmp_path, resnet):
    folder = save(MCDropout(resnet(width=8)), tmp_path / "m")
    with pytest.raises(StfsebError, match="do not fit"):
        load(folder, net=resnet(width=4))


def test_tied_parameters_are_saved(tmp_path):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.c(self.b(self.a(x)))

    method = MAP(Tied())
    again = load(save(method, tmp_path / "m"), net=Tied())
    x = torch.rand(3, 4)
    assert torch.equal(again.predict_proba(x), method.predict_proba(x))
    assert again.net.a.weight is again.net.b.weight


def test_saving_again_mends_a_damaged_model(model):
    folder, method = model
    weights = next(folder.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:100])
    save(method, folder)
    assert torch.equal(load(folder).net.output.bias, method.net.output.bias)


def test_savers_at_once_leave_one_whole_model(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    methods = [MAP(SmallCNN(hidden=4)) for _ in range(4)]
    for method in methods:
        torch.nn.init.normal_(method.net.output.bias)
    for _ in range(5):
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda method: save(method, tmp_path / "m"), methods))
        bias = load(tmp_path / "m").net.output.bias
        assert any(torch.equal(bias, method.net.output.bias) for method in methods)
        assert len(list((tmp_path / "m").iterdir())) == 2


@pytest.mark.parametrize(
    "change",
    [{"format": "2"}, {"dtype": "quux"}, {"settings": []}, {"method": 3}, {"network": []}, {"likelihood": None}],
)
def test_an_edited_description_is_refused_in_one_line(model, change):
    folder, _ = model
    meta = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps({**meta, **change}))
    with pytest.raises(StfsebError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_numpy_settings_are_saved(tmp_path):
    import numpy as np

    method = MCDropout(SmallCNN(hidden=4), sigma=np.float32(0.5), samples=np.int64(3))
    assert load(save(method, tmp_path / "m")).settings.samples == 3


def test_a_key_that_load_does_not_know_is_refused_before_anything_is_written(tmp_path):
    class Mine(MCDropout):
        key = "mine"

    with pytest.raises(StfsebError, match="Mine has the key 'mine', which load does not know"):
        save(Mine(SmallCNN()), tmp_path / "model")
    assert not (tmp_path / "model").exists()
