"""Ensembles: each member trains as if alone, samples are the members' own, models come back from disk."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from stfseb.errors import StfsebError
from stfseb.methods.ensemble import Ensemble
from stfseb.methods.fs_eb import FSEB
from stfseb.methods.map import MAP
from stfseb.methods.mc_dropout import MCDropout
from stfseb.methods.mfvi import MFVI
from stfseb.methods.saving import load, save
from stfseb.networks.cnn import SmallCNN
from stfseb.training.fit import fit


def net(seed: int) -> SmallCNN:
    torch.manual_seed(seed)
    return SmallCNN(1, 3, 0.3, image_size=4, hidden=8)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(30, 1, 4, 4, generator=generator), torch.randint(3, (30,), generator=generator)


def test_each_member_gets_its_own_gradient():
    x, y = data()
    together = Ensemble([MAP(net(0)), MAP(net(1), sigma=0.3)])
    alone = [MAP(net(0)), MAP(net(1), sigma=0.3)]
    terms = together.objective(x, y, 300)
    terms.total.backward()
    separate = [method.objective(x, y, 300) for method in alone]
    for name in terms._fields:
        torch.testing.assert_close(getattr(terms, name), sum(getattr(t, name) for t in separate))
    for t in separate:
        t.total.backward()
    expected = [p.grad for method in alone for p in method.parameters()]
    for p, g in zip(together.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, g)


def test_samples_are_the_members_own():
    x, _ = data()
    members = [MAP(net(seed)) for seed in range(3)]
    ensemble = Ensemble(members)
    assert ensemble.samples == 3
    expected = torch.stack([member.net.eval()(x) for member in members]).detach()
    torch.testing.assert_close(ensemble.sample_logits(x), expected)
    torch.testing.assert_close(ensemble.predict_proba(x), expected.softmax(-1).mean(0))
    assert ensemble.sample_logits(x, 2).shape[0] == 2
    seven = ensemble.sample_logits(x, 7)
    assert [int(((seven - row).abs() < 1e-5).all((1, 2)).sum()) for row in expected] == [3, 2, 2]
    dropped = Ensemble([MCDropout(net(0), samples=4), MCDropout(net(1), samples=4)])
    assert dropped.samples == 8
    whole = dropped.sample_logits(x, seed=3)
    torch.testing.assert_close(whole, dropped.sample_logits(x, seed=3, batch_size=7))
    assert len({tuple(row.flatten().tolist()) for row in whole}) == 8


def test_members_draw_context_points_and_noise_of_their_own():
    x, y = data()
    ensemble = Ensemble.of(lambda i: FSEB(net(i), x, num_context=5, samples=2), count=2)
    ensemble.reseed(0)
    first, second = (member.context.draw(x, 0).images for member in ensemble.members)
    assert not torch.equal(first, second)
    again = Ensemble.of(lambda i: FSEB(net(i), x, num_context=5, samples=2), count=2)
    again.reseed(0)
    torch.testing.assert_close(ensemble.objective(x, y, 300), again.objective(x, y, 300))
    assert ensemble.label == "Deep ensemble (FS-EB)"


def test_fit_trains_all_members_and_a_saved_ensemble_comes_back(tmp_path):
    x, y = data()
    before = [p.detach().clone() for seed in range(2) for p in net(seed).parameters()]
    ensemble = Ensemble([MAP(net(0)), MFVI(net(1), samples=2)])
    result = fit(ensemble, (x, y), epochs=2, batch_size=10, progress=False)
    assert len(result.history) == 2
    now = [p for member in ensemble.members for p in member.net.parameters()]
    assert all(not torch.equal(a, b) for a, b in zip(before, now, strict=True))
    save(ensemble, tmp_path / "model")
    loaded = load(tmp_path / "model")
    assert isinstance(loaded.members[1], MFVI)
    torch.testing.assert_close(loaded.sample_logits(x, seed=1), ensemble.sample_logits(x, seed=1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ensemble([MAP(net(0))]), "an ensemble of 1"),
        (lambda: Ensemble([MAP(net(0)), net(1)]), "member 1 is SmallCNN"),
        (lambda: Ensemble([MAP(one := net(0)), MFVI(one)]), "members 0 and 1 share a network"),
        (
            lambda: Ensemble.restore(nn.ModuleList([net(0)]), Ensemble([MAP(net(0)), MAP(net(1))]).settings, None),
            "nn.ModuleList of 2 fresh networks",
        ),
    ],
)
def test_what_cannot_be_an_ensemble_is_named(make, message):
    with pytest.raises(StfsebError, match=message):
        make()
