"""GFSVI's divergence through layers that torch differentiates twice wrongly, or not at all."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stfseb import fit
from stfseb.errors import StfsebError
from stfseb.methods.gfsvi import GFSVI


class HandWritten(nn.Module):
    """A weight-normalised layer by its definition, g v / |v|, with the parameters of a torch one."""

    def __init__(self, layer: nn.Module, dim: int) -> None:
        super().__init__()
        normalised = layer.parametrizations.weight
        self.g = nn.Parameter(normalised.original0.detach().clone())
        self.v = nn.Parameter(normalised.original1.detach().clone())
        self.bias = nn.Parameter(layer.bias.detach().clone())
        self.others = [axis for axis in range(self.v.ndim) if axis != dim]

    def forward(self, x: Tensor) -> Tensor:
        weight = self.g * self.v / self.v.square().sum(self.others, keepdim=True).sqrt()
        return F.linear(x, weight, self.bias) if weight.ndim == 2 else F.conv2d(x, weight, self.bias)


def prepared(net: nn.Module, context: Tensor, **settings) -> GFSVI:
    method = GFSVI(net, context, num_context=4, samples=1, cache=False, rel_sigma_init=0.7, **settings)
    method.prior.set(2.0, 1.5)
    method.reseed(0)
    return method


def slopes(net: nn.Module, context: Tensor) -> list[Tensor]:
    """Return the divergence and its gradients by means, then by scales."""
    method = prepared(net, context)
    value = method.divergence(method.context.draw(context, 0))
    value.backward()
    return [value.detach(), *(p.grad for p in method.parameters())]


def check_differences(method: GFSVI, context: Tensor) -> None:
    """Compare the divergence's gradient with central differences along a random direction."""
    draw = method.context.draw(context, 0)
    parameters = list(method.parameters())
    torch.manual_seed(3)
    direction = [torch.randn_like(p) for p in parameters]
    gradients = torch.autograd.grad(method.divergence(draw), parameters, allow_unused=True)
    found = sum(float((g * d).sum()) for g, d in zip(gradients, direction, strict=True) if g is not None)
    step, ends = 1e-6, []
    with torch.no_grad():
        for sign in (1, -2):  # forward, then back past the start
            for p, d in zip(parameters, direction, strict=True):
                p.add_(d, alpha=sign * step)
            ends.append(float(method.divergence(draw)))
    assert found == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-5)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_weight_normalised_layers_have_the_gradient_of_their_definition(kind: str, dim: int):
    torch.manual_seed(1)
    layer, last = (nn.Linear(16, 6), nn.Linear(6, 3)) if kind == "linear" else (nn.Conv2d(1, 4, 3), nn.Linear(16, 3))
    layer = nn.utils.parametrizations.weight_norm(layer, dim=dim)
    first = nn.Flatten() if kind == "linear" else nn.Identity()
    theirs = nn.Sequential(first, HandWritten(layer, dim), nn.Tanh(), nn.Flatten(), last).double()
    ours = nn.Sequential(first, layer, nn.Tanh(), nn.Flatten(), last).double()
    context = torch.rand(9, 1, 4, 4, dtype=torch.float64)
    assert [name.rpartition(".")[2] for name, _ in ours.named_parameters()][:3] == ["bias", "original0", "original1"]
    wanted = slopes(theirs, context)
    ours.zero_grad()
    found = slopes(ours, context)

    def by_layer(values: list[Tensor], order: tuple[int, int, int]) -> list[Tensor]:
        """Return the gradients with those of the first layer as bias, g, v."""
        half = (len(values) - 1) // 2
        parts = values[1 : 1 + half], values[1 + half :]
        return [v for part in parts for v in (*(part[i] for i in order), *part[3:])]

    torch.testing.assert_close(found[0], wanted[0])
    for a, b in zip(by_layer(found, (0, 1, 2)), by_layer(wanted, (2, 0, 1)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("normalise", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
@pytest.mark.parametrize("dim", [0, None])
def test_weight_normalised_layers_against_differences(normalise, dim):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Flatten(), normalise(nn.Linear(16, 6), dim=dim), nn.Tanh(), nn.Linear(6, 3)).double()
    context = torch.rand(9, 1, 4, 4, dtype=torch.float64)
    check_differences(prepared(net, context), context)


def test_a_network_of_normalised_layers_alone_against_differences():
    torch.manual_seed(1)
    normalise = nn.utils.parametrizations.weight_norm
    net = nn.Sequential(normalise(nn.Linear(5, 6)), nn.Tanh(), normalise(nn.Linear(6, 3))).double()
    context = torch.rand(9, 5, dtype=torch.float64)
    check_differences(prepared(net, context), context)


class Attention(nn.Module):
    def __init__(self, *, need_weights: bool) -> None:
        super().__init__()
        self.need_weights = need_weights
        self.embed = nn.Linear(2, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x.unflatten(1, (4, 2)))
        return self.out((h + self.attention(h, h, h, need_weights=self.need_weights)[0]).mean(1))


class Fused(nn.Module):
    """Attention written with `F.scaled_dot_product_attention`: all its layers are followed, none treated generally."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.out = nn.Linear(2, 4), nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (4, 2))
        q, k = self.queries(x).unsqueeze(1), self.keys(x).unsqueeze(1)
        return self.out(F.scaled_dot_product_attention(q, k, k).squeeze(1).mean(1))


@pytest.mark.parametrize(
    "make",
    [lambda: Attention(need_weights=False), lambda: Attention(need_weights=True), Fused],
    ids=["without weights", "with weights", "by hand"],
)
def test_fused_attention_against_differences(make):
    torch.manual_seed(2)
    net = make().double()
    context = torch.rand(9, 8, dtype=torch.float64)
    check_differences(prepared(net, context), context)
    before = torch.backends.cuda.flash_sdp_enabled()
    method = GFSVI(make(), context.float(), num_context=4, samples=1, kernel_steps=2, cache=False)
    y = torch.arange(9) % 3
    fit(method, (context.float(), y), epochs=1, progress=False)
    assert torch.backends.cuda.flash_sdp_enabled() == before


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cells, self.out = kind(2, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cells(x)[0].mean(1))


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_what_cannot_be_linearised_is_refused_with_the_remedy(kind):
    torch.manual_seed(0)
    context = torch.rand(9, 4, 2, dtype=torch.float64)
    method = prepared(Recurrent(kind).double(), context)
    with pytest.raises(StfsebError, match=r"Recurrent.*use linearise='last_layer'") as caught:
        method.objective(context, torch.arange(9) % 3, 9)
    assert "\n" not in str(caught.value)
    check_differences(prepared(Recurrent(kind).double(), context, linearise="last_layer"), context)
