"""Second derivatives through the substituted convolution and pooling, and the products, against torch's own."""

import pytest
import torch
import torch.nn.functional as F

from stfseb.methods import twice
from stfseb.methods.twice import Patches, Stage, normalised, substitute, weight_gram

OPTIONS = [
    {"padding": 1},
    {"stride": 2, "padding": (1, 0)},
    {"stride": (2, 1), "padding": 2, "dilation": 2},
    {"padding": 1, "groups": 2},
]


def second_derivative(conv, x, weight, bias):
    """Return the gradient by the parameters of a function of the gradient by the input."""
    out = conv(x, weight, bias)
    (slope,) = torch.autograd.grad((out**2).sum(), x, create_graph=True)
    return torch.autograd.grad((slope**2).sum() + out.sum(), (x, weight, bias))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_convolution_differentiated_twice(options):
    torch.manual_seed(0)
    x = torch.randn(3, 4, 7, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 4 // options.get("groups", 1), 3, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(6, dtype=torch.float64, requires_grad=True)
    ours = second_derivative(lambda *args: substitute(F.conv2d, args, options, Stage()), x, weight, bias)
    theirs = second_derivative(lambda *args: F.conv2d(*args, **options), x, weight, bias)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_inputs_only_leaves_the_weights_gradient_out():
    stage = Stage()
    x, weight = torch.randn(1, 1, 4, 4, requires_grad=True), torch.randn(1, 1, 3, 3, requires_grad=True)
    out = substitute(F.conv2d, (x, weight), {}, stage)
    stage.inputs_only = True
    by_x, by_weight = torch.autograd.grad(out.sum(), (x, weight), allow_unused=True)
    assert by_x is not None
    assert by_weight is None


def test_pooling_differentiated_twice():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, 6, dtype=torch.float64, requires_grad=True)

    def second(pool):
        (slope,) = torch.autograd.grad((pool(x) ** 3).sum(), x, create_graph=True)
        return torch.autograd.grad((slope**2).sum(), x)[0]

    ours = second(lambda v: substitute(F.max_pool2d, (v, 2), {}, Stage()))
    torch.testing.assert_close(ours, second(lambda v: F.max_pool2d(v, 2)))


def test_other_calls_are_left_to_torch():
    x = torch.randn(1, 2, 5, 5)
    assert substitute(F.max_pool2d, (x, 2), {}, Stage()) is None  # odd sides
    assert substitute(F.conv2d, (x, torch.randn(1, 2, 3, 3)), {"padding": "same"}, Stage()) is None
    assert substitute(torch.relu, (x,), {}, Stage()) is None


@pytest.mark.parametrize("options", [((3, 3), (1, 1), (1, 1), (1, 1)), ((2, 3), (2, 1), (0, 2), (1, 2))], ids=str)
def test_patches_are_unfold(options):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 7, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(Patches.apply(x, *options), F.unfold(x, *options))
    assert torch.autograd.gradcheck(lambda v: Patches.apply(v, *options), (x,))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("block", [1, 2**27])
def test_weight_gram_is_that_of_the_jacobian(groups, block, monkeypatch):
    """Against J written out, in value and gradients; for one class at a time and for all at once."""
    monkeypatch.setattr(twice, "JACOBIAN_BYTES", block)
    torch.manual_seed(0)
    g = torch.randn(3, 4, groups, 2, 5, dtype=torch.float64, requires_grad=True)
    patches = torch.randn(4, groups, 6, 5, dtype=torch.float64, requires_grad=True)
    scale = torch.rand(groups * 2 * 6, dtype=torch.float64, requires_grad=True)

    def written_out(g, patches, scale):
        jacobian = torch.einsum("lngop,ngkp->lngok", g, patches).flatten(2) * scale
        return jacobian @ jacobian.mT

    torch.testing.assert_close(weight_gram(g, patches, scale), written_out(g, patches, scale))
    assert torch.autograd.gradcheck(weight_gram, (g, patches, scale))


@pytest.mark.parametrize("compiled", [False, True])
def test_weight_gram_s_gradient_leaves_autocast(compiled):
    torch.manual_seed(0)
    tensors = torch.randn(2, 3, 1, 4, 5), torch.randn(3, 1, 6, 5), torch.rand(24)
    tensors = [tensor.requires_grad_() for tensor in tensors]

    def total(g, patches, scale):
        with torch.autocast("cpu", enabled=False):
            return weight_gram(g, patches, scale).square().sum()

    wanted = torch.autograd.grad(total(*tensors), tensors)
    run = torch.compile(total, backend="aot_eager", dynamic=False) if compiled else total
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(run(*tensors), tensors)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))


def test_sums_in_parts_are_the_product():
    torch.manual_seed(0)
    g, patches, scale = torch.randn(2, 3, 1, 90, 1), torch.randn(3, 1, 101, 1), torch.rand(9090)
    jacobian = torch.einsum("lngop,ngkp->lngok", g, patches).flatten(2).double() * scale
    torch.testing.assert_close(weight_gram(g, patches, scale), jacobian @ jacobian.mT, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("dim", "norms"), [(0, (3, 1, 1)), (1, (1, 4, 1)), (2, (1, 1, 2)), (-2, (1, 4, 1)), (-1, ())])
def test_weight_normalisation_differentiated_twice(dim, norms):
    torch.manual_seed(0)
    v = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    g = torch.rand(norms, dtype=torch.float64, requires_grad=True)
    ours = substitute(torch._weight_norm, (v, g, dim), {}, Stage())
    torch.testing.assert_close(ours, torch._weight_norm(v, g, dim))
    torch.testing.assert_close(substitute(torch._weight_norm, (v,), {"g": g, "dim": dim}, Stage()), ours)
    assert torch.autograd.gradgradcheck(lambda v, g: normalised(torch._weight_norm, (v, g, dim), {}), (v, g))
