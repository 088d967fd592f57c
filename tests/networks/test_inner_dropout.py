"""Dropout inside of attention and recurrent layers: off where a method has none, refused where it wants masks."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stfseb
from stfseb.errors import StfsebError


class Read(nn.Module):
    """A layer over sequences (N, T, 8), and logits of its mean over time."""

    def __init__(self, layer, run):
        super().__init__()
        self.layer, self.run, self.out = layer, run, nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.run(self.layer, x).mean(1))


def packed(layer, x):
    out, _ = layer(nn.utils.rnn.pack_padded_sequence(x, [x.shape[1]] * len(x), batch_first=True))
    return nn.utils.rnn.pad_packed_sequence(out, batch_first=True)[0]


def recurrent(kind, rate):
    return kind(8, 8, 2, batch_first=True, dropout=rate)


def attention(rate):
    return nn.MultiheadAttention(8, 2, dropout=rate, batch_first=True)


NETWORKS = {
    "lstm": lambda rate: Read(recurrent(nn.LSTM, rate), lambda layer, x: layer(x)[0]),
    "packed lstm": lambda rate: Read(recurrent(nn.LSTM, rate), packed),
    "gru": lambda rate: Read(recurrent(nn.GRU, rate), lambda layer, x: layer(x)[0]),
    "packed gru": lambda rate: Read(recurrent(nn.GRU, rate), packed),
    "rnn": lambda rate: Read(recurrent(nn.RNN, rate), lambda layer, x: layer(x)[0]),
    "attention": lambda rate: Read(attention(rate), lambda layer, x: layer(x, x, x, need_weights=False)[0]),
    "attention with weights": lambda rate: Read(attention(rate), lambda layer, x: layer(x, x, x)[0]),
    "encoder": lambda rate: Read(
        nn.TransformerEncoderLayer(8, 2, 16, rate, batch_first=True), lambda layer, x: layer(x)
    ),
    "by position": lambda rate: Read(
        nn.Identity(), lambda layer, x: F.scaled_dot_product_attention(layer(x), x, x, None, rate)
    ),
    "by name": lambda rate: Read(
        nn.Identity(), lambda layer, x: F.scaled_dot_product_attention(layer(x), x, x, dropout_p=rate)
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_methods_without_dropout_train_the_network_without_it(name):
    """Training mode, dropout of a half inside: value and gradients are those of the same network at rate 0."""
    x, y = torch.rand(6, 5, 8), torch.arange(6) % 3
    net, plain = NETWORKS[name](0.5).train(), NETWORKS[name](0.0).train()
    plain.load_state_dict(net.state_dict())
    loss = stfseb.MAP(net).objective(x, y, 6).data
    loss.backward()
    expected = F.cross_entropy(plain(x), y, reduction="sum")
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    fresh = NETWORKS[name](0.5).train()
    assert F.cross_entropy(fresh(x), y) != F.cross_entropy(fresh(x), y)  # so that there was something to switch off


@pytest.mark.parametrize("name", ["lstm", "attention", "by position"])
def test_weight_samples_see_no_dropout_either(name):
    method = stfseb.MFVI(NETWORKS[name](0.5).train(), samples=2)
    x = torch.rand(4, 5, 8)
    assert torch.equal(method.sample_logits(x, 3, seed=1), method.sample_logits(x, 3, seed=1))
    theta = method.draw_weights(2)
    assert torch.equal(method.run_weights(x, theta), method.run_weights(x, theta))


def test_monte_carlo_dropout_refuses_a_rate_given_by_position():
    net = nn.Sequential(NETWORKS["by position"](0.25), nn.Dropout(0.5))
    method = stfseb.MCDropout(net)
    with pytest.raises(StfsebError, match=r"scaled_dot_product_attention with a dropout rate of 0\.25"):
        method.objective(torch.rand(4, 5, 8), torch.arange(4) % 3, 4)
    quiet = stfseb.MCDropout(nn.Sequential(NETWORKS["by position"](0.0), nn.Dropout(0.5)))
    quiet.objective(torch.rand(4, 5, 8), torch.arange(4) % 3, 4)


def test_a_single_recurrent_layer_has_no_dropout_inside():
    """torch ignores the rate of a network of one layer (and warns), so nothing is refused."""

    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = [torch.rand(24, 8), torch.rand(24, 8)]
            self.out = nn.Linear(8, 3)

        def forward(self, x):
            h, _ = torch.gru(x, torch.zeros(1, len(x), 8), self.weights, False, 1, 0.5, True, False, True)
            return self.out(F.dropout(h[:, -1], 0.5))

    method = stfseb.MCDropout(One())
    assert method.objective(torch.rand(4, 5, 8), torch.arange(4) % 3, 4).total > 0
