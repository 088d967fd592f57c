"""Stacked weights against one functional call a sample, and the convolution's gradients against autograd's."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from stfseb.networks.cnn import DeepCNN, SmallCNN
from stfseb.networks.stacked import stacked_chain
from stfseb.networks.stacked_conv import indexable, stacked_conv

CHAINS = {
    "small": lambda: SmallCNN(classes=4, image_size=8),
    "deep": lambda: DeepCNN(classes=3, image_size=8),
    "dense": lambda: nn.Sequential(nn.Flatten(), nn.Linear(75, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 2)),
    "five": lambda: nn.Sequential(
        nn.Conv2d(3, 16, 5, padding=2, bias=False), nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)
    ),
    "prefix": lambda: nn.Sequential(
        nn.AvgPool2d(2), nn.Conv2d(3, 16, 1), nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(3)
    ),
}


def tied() -> nn.Sequential:
    first, second = nn.Linear(75, 75), nn.Linear(75, 75)
    second.weight = first.weight
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), second, nn.Linear(75, 2))


CHAINS |= {
    "tied": tied,
    "sequence": lambda: nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3)),
    "bare": lambda: nn.Linear(8, 3),
}


def stacked_weights(net: nn.Module, samples: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {n: (p + 0.1 * torch.randn(samples, *p.shape)).detach().requires_grad_() for n, p in net.named_parameters()}


@pytest.mark.parametrize("name", CHAINS)
def test_values_and_gradients_are_those_of_one_call_a_sample(name: str) -> None:
    torch.manual_seed(0)
    net = CHAINS[name]()
    side = 5 if name in ("dense", "tied") else 8
    x = torch.rand(6, 1 if name == "small" else 3, side, side)
    if name == "bare":
        x = x[:, 0, 0]
    net.eval()
    net(x)
    weights = stacked_weights(net, 3)
    run = stacked_chain(net)
    assert run is not None
    ours = run(x, weights, 3)
    theirs = torch.stack([functional_call(net, {n: w[s] for n, w in weights.items()}, (x,)) for s in range(3)])
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    outer = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad(ours, list(weights.values()), outer),
        torch.autograd.grad(theirs, list(weights.values()), outer),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "net",
    [
        nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Flatten(), nn.Linear(64, 2)),
        nn.Sequential(nn.Conv2d(3, 16, 3), nn.Flatten(), nn.Linear(64, 2)),
        nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, stride=2), nn.Flatten(), nn.Linear(64, 2)),
        nn.Sequential(nn.Conv2d(3, 20, 3, padding=1), nn.Flatten(), nn.Linear(64, 2)),
        nn.Sequential(nn.Conv2d(32, 32, 3, padding=1, groups=2), nn.Flatten()),
        nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, padding_mode="reflect"), nn.Flatten()),
        nn.Sequential(nn.ReLU(), nn.Flatten()),
        nn.TransformerEncoderLayer(8, 2),
    ],
    ids=["norm", "valid padding", "stride", "channels", "groups", "reflection", "no weights", "no chain"],
)
def test_other_networks_are_left_to_vmap(net: nn.Module) -> None:
    assert stacked_chain(net) is None


def test_a_hooked_layer_is_left_to_vmap() -> None:
    net = SmallCNN()
    net.conv2.register_forward_hook(lambda *_: None)
    assert stacked_chain(net) is None


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kernel", [(3, 3), (1, 1), (5, 3)])
def test_the_convolution_passes_gradcheck(shared: bool, kernel: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(1 if shared else 2, 2, 4, 5, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, kernel[0] * kernel[1], 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: stacked_conv(a, b, *kernel), (x, weight))


def test_the_kernels_are_left_out_where_32_bits_do_not_reach() -> None:
    rows = torch.empty(1, 2**14 - 1, 32, 32, 16, device="meta")
    assert indexable(rows, 128)
    assert not indexable(torch.empty(1, 2**14, 32, 32, 16, device="meta"), 128)
    assert indexable(torch.empty(10, 2**14, 32, 32, 16, device="meta"), 16)  # samples are told apart by 64 bits


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("shape", [(10, 128, 14, 32, 64), (1, 128, 28, 16, 32), (3, 7, 8, 128, 128), (2, 5, 7, 64, 16)])
@pytest.mark.parametrize("side", [1, 3])
def test_the_card_agrees_with_float64(shape: tuple[int, ...], side: int) -> None:
    samples, rows, size, channels, outputs = shape
    torch.manual_seed(0)
    x = torch.randn(samples, rows, size, size, channels, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(max(samples, 2), side * side, channels, outputs, device="cuda").bfloat16().requires_grad_()
    out = stacked_conv(x, weight, side, side)
    outer = torch.randn_like(out)
    found = torch.autograd.grad(out, (x, weight), outer)
    a, b = (t.detach().double().cpu().requires_grad_() for t in (x, weight))
    exact = stacked_conv(a, b, side, side)
    wanted = torch.autograd.grad(exact, (a, b), outer.double().cpu())
    for ours, theirs in zip((out, *found), (exact, *wanted), strict=True):
        error = (ours.double().cpu() - theirs).norm() / theirs.norm()
        assert error < 5e-3, error
