"""Saved models: the same predictions after loading, on any folder state, and clear refusals."""

import json
import math
import os

import pytest
import torch

import stfseb
from stfseb import FSEB, GFSVI, MAP, MFVI, STFSEB, Ensemble, MCDropout, SmallCNN, StfsebError, fit, load, save


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


class Mixed(torch.nn.Module):
    """bfloat16 and float32 side by side, parameters and buffers."""

    def __init__(self, low=torch.bfloat16):
        super().__init__()
        self.a, self.dropout = torch.nn.Linear(4, 8).to(low), torch.nn.Dropout(0.2)
        self.b, self.norm = torch.nn.Linear(8, 3), torch.nn.BatchNorm1d(3)
        self.register_buffer("shift", torch.linspace(0, 1, 3, dtype=torch.float64), persistent=False)

    def forward(self, x):
        hidden = self.dropout(torch.relu(self.a(x.to(self.a.weight.dtype))))
        return self.norm(self.b(hidden.to(self.b.weight.dtype))) + self.shift.to(self.b.weight.dtype)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float32])  # of the fresh network
@pytest.mark.parametrize("make", [MCDropout, MFVI, lambda net: Ensemble([MCDropout(net), MFVI(Mixed())])])
def test_each_tensor_comes_back_in_its_own_precision(tmp_path, make, low):
    torch.manual_seed(0)
    method = make(Mixed())
    fresh = torch.nn.ModuleList([Mixed(low), Mixed(low)]) if isinstance(method, Ensemble) else Mixed(low)
    again = load(save(method, tmp_path / "m"), net=fresh)
    kept, found = method.state_dict(), again.state_dict()
    assert {name: value.dtype for name, value in found.items()} == {name: value.dtype for name, value in kept.items()}
    assert all(torch.equal(found[name], value) for name, value in kept.items())
    assert {b.dtype for name, b in again.named_buffers() if name.endswith("shift")} == {torch.float64}
    x = torch.rand(5, 4)
    assert torch.equal(again.sample_logits(x, 4, seed=0), method.sample_logits(x, 4, seed=0))


def test_the_context_s_fingerprint_stays_through_loading_and_saving(tmp_path):
    torch.manual_seed(0)
    method = STFSEB(SmallCNN(hidden=4), torch.rand(40, 1, 28, 28))
    first = save(method, tmp_path / "first")
    second = save(load(first), tmp_path / "second")
    third = save(load(second), tmp_path / "third")
    kept = [json.loads((folder / "model.json").read_text())["context"] for folder in (first, second, third)]
    assert kept[0]["count"] == 40
    assert kept == [kept[0]] * 3


def test_a_model_without_context_stays_without(tmp_path):
    folder = save(load(save(MAP(SmallCNN(hidden=4)), tmp_path / "a")), tmp_path / "b")
    meta = json.loads((folder / "model.json").read_text())
    assert meta["context"] is None
    assert "context" not in meta["provenance"]


def plain(dropout=0.2):
    torch.manual_seed(0)
    layers = torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Dropout(dropout), torch.nn.Linear(6, 3)
    return torch.nn.Sequential(*layers)


def frozen():
    net = plain()
    net[0].requires_grad_(False)
    return net


FROZEN = {
    "map": MAP,
    "mcdropout": MCDropout,
    "mfvi": MFVI,
    "fseb": lambda net: FSEB(net, torch.rand(40, 4)),
    "gfsvi": lambda net: GFSVI(net, torch.rand(40, 4), cache=False),
    "ensemble": lambda net: Ensemble([MFVI(net), MAP(plain()), MFVI(plain())]),
}


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("name", FROZEN)
def test_frozen_layers_are_frozen_again(tmp_path, name, older):
    method = FROZEN[name](frozen())
    folder = save(method, tmp_path / "m")
    if older:  # as models were written before
        meta = json.loads((folder / "model.json").read_text())
        assert meta.pop("frozen")
        (folder / "model.json").write_text(json.dumps(meta))
    fresh = torch.nn.ModuleList(plain() for _ in range(3)) if name == "ensemble" else plain()
    again = load(folder, net=fresh)
    x = torch.rand(5, 4)
    assert torch.equal(again.sample_logits(x, 6, seed=0), method.sample_logits(x, 6, seed=0))
    if not (older and name in {"map", "mcdropout"}):
        asked = [p.requires_grad for p in method.parameters()]
        assert [p.requires_grad for p in again.parameters()] == asked


def test_layers_that_the_fresh_network_freezes_but_the_saved_one_trained(tmp_path):
    for kind in (MFVI, MAP):
        method = kind(plain())
        again = load(save(method, tmp_path / kind.key), net=frozen())
        assert all(p.requires_grad for p in again.parameters())
        x = torch.rand(5, 4)
        assert torch.equal(again.sample_logits(x, 2, seed=0), method.sample_logits(x, 2, seed=0))


def test_a_model_frozen_for_prediction_can_be_loaded(tmp_path):
    for kind in (MFVI, MAP):
        method = kind(plain())
        x = torch.rand(5, 4)
        wanted = method.sample_logits(x, 2, seed=0)
        method.requires_grad_(False)
        again = load(save(method, tmp_path / kind.key), net=plain())
        assert torch.equal(again.sample_logits(x, 2, seed=0), wanted)


def test_a_network_without_the_saved_one_s_dropout_is_named(tmp_path):
    folder = save(STFSEB(plain(), torch.rand(40, 4)), tmp_path / "m")
    other = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
    with pytest.raises(StfsebError, match=r"Sequential is not the network that was saved.*no dropout") as caught:
        load(folder, net=other)
    assert "add nn.Dropout" not in str(caught.value)
    ensemble = save(Ensemble([MAP(plain()), MAP(plain())]), tmp_path / "e")
    with pytest.raises(StfsebError, match=r"give net=nn\.ModuleList of 2 fresh networks"):
        load(ensemble, net=plain())


def test_another_network_is_refused_by_mean_field_methods_too(tmp_path):
    folder = save(MFVI(plain()), tmp_path / "m")
    with pytest.raises(StfsebError, match="do not fit Linear"):
        load(folder, net=torch.nn.Linear(4, 3))


class Dropped(torch.nn.Module):
    """Dropout as a module and as a function with a rate of its own."""

    def __init__(self, rate=0.1, inner=0.1):
        super().__init__()
        self.inner, self.drop, self.head = Inner(inner), torch.nn.Dropout(rate), torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.drop(self.inner(x)))


class Inner(torch.nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.dropout, self.layer = dropout, torch.nn.Linear(4, 4)

    def forward(self, x):
        return torch.nn.functional.dropout(self.layer(x), self.dropout, self.training)


def test_other_dropout_rates_than_the_saved_ones_are_refused(tmp_path):
    folder = save(STFSEB(Dropped(), torch.rand(40, 4)), tmp_path / "m")
    assert json.loads((folder / "model.json").read_text())["dropout"] == {"inner.dropout": 0.1, "drop": 0.1}
    load(folder, net=Dropped())
    for other, said in (
        (Dropped(0.5, 0.5), r"layer 'inner.dropout' has dropout rate 0.5, in the saved model dropout rate 0.1 \(and 1"),
        (Dropped(0.1, 0.0), "layer 'inner.dropout' has dropout rate 0, in the saved model dropout rate 0.1: make the"),
    ):
        with pytest.raises(StfsebError, match=said):
            load(folder, net=other)
    renamed = Dropped()
    renamed.inner.dropout_rate, renamed.inner.dropout = 0.1, torch.tensor(0.1)
    load(folder, net=renamed)


def test_dropout_rates_inside_ensembles_are_compared(tmp_path):
    folder = save(Ensemble([MCDropout(Dropped()), MCDropout(Dropped())]), tmp_path / "e")
    load(folder, net=torch.nn.ModuleList([Dropped(), Dropped()]))
    with pytest.raises(StfsebError, match=r"layer '1.inner.dropout' has dropout rate 0.3"):
        load(folder, net=torch.nn.ModuleList([Dropped(), Dropped(0.3, 0.3)]))


def test_dropout_rates_do_not_matter_where_dropout_is_off_or_the_model_is_of_before(tmp_path):
    load(save(MAP(Dropped()), tmp_path / "map"), net=Dropped(0.5))
    folder = save(MCDropout(Dropped()), tmp_path / "m")
    meta = json.loads((folder / "model.json").read_text())
    del meta["dropout"]
    (folder / "model.json").write_text(json.dumps(meta))
    load(folder, net=Dropped(0.5, 0.5))


def test_a_class_in_place_of_a_network_is_said_to_be_one(tmp_path):
    folder = save(MAP(plain()), tmp_path / "m")
    with pytest.raises(StfsebError, match=r"net is the class Dropped: give an instance, Dropped\(\.\.\.\)"):
        load(folder, net=Dropped)
    with pytest.raises(StfsebError, match="net is the class Dropped"):
        MAP(Dropped)
    with pytest.raises(StfsebError, match=r"net is str: give an nn.Module"):
        load(folder, net="resnet")


def test_weights_that_do_not_fit_are_named_whole(tmp_path, resnet):
    folder = save(MCDropout(resnet(width=8)), tmp_path / "m")
    with pytest.raises(StfsebError, match=r"\(8,.*\) in the model and \(4,.*, and \d+ more: give the network that was"):
        load(folder, net=resnet(width=4))


def test_the_model_of_a_run_that_is_unfinished(tmp_path):
    run = tmp_path / "runs" / "a b"
    run.mkdir(parents=True)
    (run / "checkpoint").write_bytes(b"")
    with pytest.raises(StfsebError, match="is unfinished and has no model yet: start the command that began it again"):
        load(run / "model")
    (run / "run.json").write_text("{}")
    for folder in (run, run / "model"):
        with pytest.raises(StfsebError, match=r"unfinished and has no model yet: go on .* train --resume '.*/a b''"):
            load(folder)


def test_rates_that_were_changed_after_a_built_in_network_was_made_come_back(tmp_path):
    """The network is rebuilt here, so its rates are those of the model: nobody else could give them."""

    def annealed():
        net = SmallCNN(dropout=0.5, hidden=8)
        for layer in (net.dropout1, net.dropout2, net.dropout):
            layer.p = 0.25
        return MCDropout(net, samples=2)

    x = torch.rand(3, 1, 28, 28)
    for method in (annealed(), Ensemble([annealed(), annealed()])):
        loaded = load(save(method, tmp_path / type(method).__name__))
        assert {m.p for m in loaded.modules() if isinstance(m, torch.nn.Dropout)} == {0.25}
        assert torch.equal(loaded.sample_logits(x, 2, seed=0), method.eval().sample_logits(x, 2, seed=0))
