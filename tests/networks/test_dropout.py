"""Masks: their law, their layout, and that nothing else of the network is touched."""

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import nn

from stfseb.errors import StfsebError
from stfseb.networks import folding
from stfseb.networks.dropout import Block, MonteCarloDropout, NoDropout, check_has_dropout, keep_mask, module_rates
from stfseb.networks.folding import FoldedNetwork, chain, deterministic, first_dropout

CPU = torch.device("cpu")


def draw(shape, rate, seed=0, dtype=torch.float64):
    return keep_mask(shape, rate, dtype, CPU, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rate", [0.5, 0.25, 0.1, 0.3, 0.9, 0.001])
def test_mask_has_the_rate_and_mean_one(rate):
    mask = draw((400_000,), rate)
    dropped = int((mask == 0).sum())
    assert stats.binomtest(dropped, 400_000, rate).pvalue > 1e-4
    kept = mask[mask > 0]
    assert torch.all(kept == kept[0])
    assert kept[0] * (1 - rate) == pytest.approx(1.0, abs=2e-4)


@pytest.mark.parametrize("rate", [0.5, 0.3])
def test_lanes_of_one_word_are_independent_and_alike(rate):
    """Every lane of the 64-bit words has the rate, and pairs of lanes fall in the four cells as they should."""
    mask = (draw((80_000, 8), rate, seed=3) == 0).numpy()
    for lane in range(8):
        assert stats.binomtest(int(mask[:, lane].sum()), len(mask), rate).pvalue > 1e-4
    for i in range(8):
        for j in range(i + 1, 8):
            table = [[((mask[:, i] == a) & (mask[:, j] == b)).sum() for b in (0, 1)] for a in (0, 1)]
            assert stats.chi2_contingency(table).pvalue > 1e-5


def test_rate_zero_keeps_all_and_shape_is_kept():
    assert torch.equal(draw((3, 5, 7), 0.0), torch.ones(3, 5, 7, dtype=torch.float64))


def test_shared_rows_share_and_other_rows_do_not():
    mode = MonteCarloDropout(4, [Block(16, shared=False), Block(8, shared=True)], folded=True)
    with mode:
        out = F.dropout(torch.ones(4 * 24, 200), 0.5, training=False).view(4, 24, 200)
    own, shared = out[:, :16], out[:, 16:]
    assert torch.equal(shared, shared[:, :1].expand_as(shared))
    flat = torch.cat([own.reshape(-1, 200), shared[:, 0]])
    assert len(torch.unique(flat, dim=0)) == len(flat)
    assert mode.rates == {0.5}


def test_blocks_follow_their_own_generators():
    def run(seed):
        generator = torch.Generator().manual_seed(seed)
        with MonteCarloDropout(2, [Block(3, False), Block(2, True, generator)], folded=True):
            return F.dropout(torch.ones(10, 50), 0.5).view(2, 5, 50)

    torch.manual_seed(0)
    a = run(1)
    b = run(1)
    assert torch.equal(a[:, 3:], b[:, 3:])
    assert not torch.equal(a[:, :3], b[:, :3])


def test_channel_dropout_drops_whole_channels():
    with MonteCarloDropout(3, [Block(5, shared=False)], folded=True):
        out = nn.Dropout2d(0.5).eval()(torch.ones(15, 40, 4, 4))
    assert torch.equal(out, out[..., :1, :1].expand_as(out))
    assert 0.3 < float((out[..., 0, 0] == 0).float().mean()) < 0.7


def test_channels_last_is_kept_and_agrees():
    x = torch.rand(6, 5, 4, 4).contiguous(memory_format=torch.channels_last)
    with MonteCarloDropout(2, [Block(3, shared=True)], folded=True):
        out = F.dropout(x, 0.5)
    assert out.is_contiguous(memory_format=torch.channels_last)
    ratio = (out / x).view(2, 3, 5, 4, 4)
    assert torch.allclose(ratio, ratio[:, :1].expand_as(ratio))
    assert set(ratio.round().unique().tolist()) == {0.0, 2.0}


def test_first_dropout_unfolds():
    with MonteCarloDropout(4, [Block(3, shared=False)], folded=False):
        out = F.dropout(torch.ones(3, 6), 0.5)
        assert out.shape == (12, 6)
        assert F.dropout(out, 0.5).shape == (12, 6)


def test_in_place_dropout_is_applied():
    with MonteCarloDropout(2, [Block(3, shared=False)], folded=True):
        x = torch.ones(6, 100)
        F.dropout(x, 0.5, inplace=True)
    assert 0.2 < float((x == 0).float().mean()) < 0.8


def test_a_first_dimension_that_is_not_the_batch_is_refused():
    with MonteCarloDropout(2, [Block(3, False)], folded=True), pytest.raises(StfsebError, match="batch-first"):
        F.dropout(torch.ones(7, 3), 0.5)


class FunctionalNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 30), nn.Linear(30, 3)
        self.norm = nn.BatchNorm1d(30)

    def forward(self, x):
        return self.b(F.dropout(self.norm(self.a(x)), 0.4, training=self.training))


def test_functional_dropout_is_active_in_eval_and_batch_norm_is_not():
    net = FunctionalNet().eval()
    check_has_dropout(net)
    before = net.norm.running_mean.clone()
    logits, rates = FoldedNetwork(net)(torch.randn(6, 4), 5, [Block(6, shared=True)])
    assert rates == {0.4}
    assert logits.shape == (5, 6, 3)
    assert not torch.allclose(logits[0], logits[1])
    assert torch.equal(net.norm.running_mean, before)
    assert not net.training


def noisy(x):
    return F.dropout(x, 0.5)


class Roundabout(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x):
        return self.fc(noisy(x))


def test_dropout_in_a_function_that_forward_calls_is_found():
    check_has_dropout(Roundabout())


def test_no_dropout_is_the_identity_even_in_training_mode():
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.AlphaDropout(0.5), nn.Linear(8, 2)).train()
    x = torch.randn(5, 4)
    assert torch.equal(deterministic(net, x), net.eval()(x))


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_shared_prefix_equals_folding_everything(rate):
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Sequential(nn.ReLU(), nn.Dropout(rate)), nn.Flatten(), nn.Linear(144, 3))
    x = torch.rand(7, 1, 8, 8)
    blocks = [Block(5, shared=False), Block(2, shared=True, generator=torch.Generator().manual_seed(1))]
    assert first_dropout(chain(net)) == 2
    torch.manual_seed(0)
    shared, _ = FoldedNetwork(net)(x, 3, blocks)
    blocks = [Block(5, shared=False), Block(2, shared=True, generator=torch.Generator().manual_seed(1))]
    torch.manual_seed(0)
    whole, _ = FoldedNetwork(net, share_prefix=False)(x, 3, blocks)
    assert torch.allclose(shared, whole, atol=1e-6)


def test_prefix_runs_once():
    calls = []
    first = nn.Linear(4, 4)
    first.register_forward_hook(lambda m, i, o: calls.append(len(o)))
    FoldedNetwork(nn.Sequential(first, nn.Dropout(0.5), nn.Linear(4, 2)))(torch.rand(6, 4), 10, [Block(6, False)])
    assert calls == [6]


def test_prefix_with_a_dropout_of_its_own_is_folded_whole():
    class Noisy(nn.Module):
        def forward(self, x):
            return F.dropout(x, 0.5)

    folded = FoldedNetwork(nn.Sequential(nn.Linear(4, 64), Noisy(), nn.Dropout(0.5), nn.Linear(64, 2)))
    logits, _ = folded(torch.rand(6, 4), 3, [Block(6, shared=False)])
    assert logits.shape == (3, 6, 2)
    assert not folded.share_prefix


class Own(nn.Module):
    """A network with a `forward` of its own."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(4, 6, dtype=dtype), nn.BatchNorm1d(6, dtype=dtype)
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(6, 3, dtype=dtype)
        self.seen = []

    def forward(self, x):
        h = torch.tanh(self.norm(self.first(x)))
        self.seen.append(len(h))
        return self.last(self.behind(h))

    def behind(self, h):
        return self.drop(h)


class Bypass(Own):
    def behind(self, h):
        return h + self.drop(h)


class Branches(Own):
    def behind(self, h):
        return self.drop(h) + self.drop(h.flip(-1))


class Pooled(Own):
    """Remembers how many rows there were: behind the dropout there are more."""

    def behind(self, h):
        return self.drop(h).view(len(h), -1, 6).mean(1)


class Turned(Own):
    """As many rows as there should be, in another order."""

    def behind(self, h):
        return self.drop(h).view(len(h), -1, 6).transpose(0, 1).reshape(-1, 6)


class Ignored(Own):
    def behind(self, h):
        h = h.clone()
        F.dropout(h, 0.5, inplace=True)
        return h


def blocks_of():
    return [Block(5, shared=False), Block(2, shared=True, generator=torch.Generator().manual_seed(1))]


@pytest.mark.parametrize(
    ("kind", "whole"), [(Own, False), (Bypass, True), (Branches, True), (Pooled, True), (Turned, True), (Ignored, True)]
)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_forward_of_ones_own_runs_once_up_to_its_first_dropout_where_that_is_the_same(kind, whole, mode):
    net = getattr(kind(), mode)()
    x = torch.rand(7, 4, generator=torch.Generator().manual_seed(2))
    found = []
    for share in (True, False):
        folded = FoldedNetwork(net, share_prefix=share)
        torch.manual_seed(0)
        net.zero_grad()
        logits, _ = folded(x, 3, blocks_of())
        (logits**3).sum().backward()
        found.append((logits.detach(), net.first.weight.grad.clone(), net.last.weight.grad.clone()))
        assert folded.whole is (whole or not share)
        assert net.seen[-1] == (21 if folded.whole else 7)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_finding_that_out_leaves_nothing_behind():
    net = Own().train()
    net.drop.eval()
    torch.manual_seed(0)
    before, state = torch.get_rng_state(), {k: v.clone() for k, v in net.state_dict().items()}
    assert folding._needs_whole(net, torch.rand(7, 4, generator=torch.Generator())) is False
    assert net.seen == [6, 2]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())
    assert [m.training for m in (net, net.norm, net.drop)] == [True, True, False]
    assert folding._needs_whole(net, torch.rand(1, 4)) is False  # one row is turned for a second one
    assert folding._needs_whole(net, torch.rand(0, 4)) is None
    assert folding._needs_whole(net, torch.rand(7, 5)) is None  # of the wrong shape: nothing is settled
    nn.init.zeros_(net.last.weight)
    assert folding._needs_whole(net, torch.rand(7, 4)) is True  # the bias alone tells nothing
    assert folding._needs_whole(Own(torch.bfloat16), torch.rand(7, 4).bfloat16()) is True  # its digits tell nothing


def test_a_single_row_passes_batch_norm_in_training():
    net, x = Own().train(), torch.rand(7, 4)
    folded = FoldedNetwork(net)
    assert folded(x, 3, blocks_of())[0].shape == (3, 7, 3)
    assert folded.whole is False
    assert folded(x[:1], 3, [Block(1, shared=False)])[0].shape == (3, 1, 3)
    assert net.seen[-1] == 3
    net.eval()
    folded(x[:1], 3, [Block(1, shared=False)])
    assert net.seen[-1] == 1


def test_what_goes_together_in_evaluation_alone_is_repeated_whole():
    class Pooling(Own):
        def behind(self, h):
            return self.drop(h).view(len(h), -1, 6).mean(1) if self.training else self.drop(h)

    net, x = Pooling(), torch.rand(7, 4)
    folded = FoldedNetwork(net.eval())
    folded(x, 3, blocks_of())
    assert folded.whole is False
    net.train()
    logits, _ = folded(x, 3, blocks_of())
    assert folded.whole is True
    assert logits.shape == (3, 7, 3)


def test_networks_without_dropout_are_refused():
    with pytest.raises(StfsebError, match="no dropout"):
        check_has_dropout(nn.Linear(3, 2))

    class Forgotten(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.drop = nn.Linear(3, 2), nn.Dropout(0.5)

        def forward(self, x):
            return self.fc(x)

    check_has_dropout(Forgotten())
    with pytest.raises(StfsebError, match="no dropout ran"):
        FoldedNetwork(Forgotten())(torch.rand(2, 3), 4, [Block(2, False)])


@pytest.mark.parametrize(
    ("module", "match"),
    [
        (nn.AlphaDropout(0.1), "AlphaDropout"),
        (nn.LSTM(3, 3, 2, dropout=0.2), "LSTM"),
        (nn.MultiheadAttention(4, 2, dropout=0.1), "MultiheadAttention"),
    ],
)
def test_dropout_that_cannot_be_given_masks_is_refused(module, match):
    with pytest.raises(StfsebError, match=match):
        module_rates(nn.Sequential(module))


def test_attention_dropout_is_refused_and_switched_off():
    q = torch.rand(2, 1, 4, 8)
    with MonteCarloDropout(1, [Block(2, False)], folded=True), pytest.raises(StfsebError, match="attention"):
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    with NoDropout():
        off = F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    assert torch.allclose(off, F.scaled_dot_product_attention(q, q, q))


def test_gradient_goes_through_the_mask():
    x = torch.rand(3, 20, dtype=torch.float64, requires_grad=True)
    with MonteCarloDropout(4, [Block(3, shared=False)], folded=False):
        out = F.dropout(x, 0.5)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.allclose(grad, (out.view(4, 3, 20) / x).sum(0).detach())
