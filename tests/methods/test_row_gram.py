"""Products of Jacobians over weights against einsum in float64."""

import pytest
import torch

from stfseb.methods.row_gram import row_gram, row_slopes

SIZES = [(32, 3, 200), (5, 2, 70), (40, 2, 130), (100, 1, 65), (1, 1, 3), (8, 2, 9090)]


def made(rows, classes, weights, dtype=torch.float32, device="cpu"):
    torch.manual_seed(0)
    jacobian, scale = torch.randn(rows, classes, weights, dtype=dtype), torch.rand(weights, dtype=dtype)
    slope = torch.randn(classes, rows, rows, dtype=torch.float64)
    return jacobian.to(device), scale.to(device), (slope + slope.mT).to(device)


def compare(jacobian, scale, slope):
    rounded, wide = (jacobian * scale).double(), jacobian.double()
    expected = torch.einsum("ilp,jlp->lij", rounded, rounded)
    found = row_gram(jacobian, scale)
    assert found.dtype == torch.float64
    assert (found - expected).abs().max() <= 1e-13 * expected.abs().max()  # single precision: 1e-7
    by_jacobian, by_scale = row_slopes(jacobian, scale, slope)
    assert by_jacobian.dtype == by_scale.dtype == jacobian.dtype
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}[jacobian.dtype]
    through = torch.einsum("lij,jlp->ilp", slope, rounded)
    for ours, theirs in (
        (by_jacobian, through * scale.double()),
        (by_scale, torch.einsum("ilp,ilp->p", through, wide)),
    ):
        assert (ours.double() - theirs).abs().max() <= tolerance * theirs.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products_are_einsum_s(sizes, dtype):
    compare(*made(*sizes, dtype=dtype))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("sizes", [*SIZES, (32, 10, 147456)], ids=str)
def test_the_card_s_kernels_are_einsum_s(sizes, caplog):
    compare(*made(*sizes, device="cuda"))
    assert "cannot run here" not in caplog.text


def test_slopes_are_the_gradients():
    jacobian, scale, slope = made(6, 2, 11, torch.float64)
    jacobian.requires_grad_()
    scale.requires_grad_()
    scaled = (jacobian * scale).transpose(0, 1)
    gradient = slope.tril()  # D = G + G' of any G
    wanted = torch.autograd.grad((scaled @ scaled.mT * gradient).sum(), (jacobian, scale))
    found = row_slopes(jacobian.detach(), scale.detach(), gradient + gradient.mT)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


TYPES = [
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),  # what autocast made of J, with scales as they are
    (torch.float32, torch.float64),
]


def check_promises(types, device):
    jacobian, scale, slope = made(6, 2, 11, types[0], device)
    scale = scale.to(types[1])
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(row_gram, (jacobian, scale), test_utils=checks)
    torch.library.opcheck(row_slopes, (jacobian, scale, slope), test_utils=checks)
    by_jacobian, by_scale = row_slopes(jacobian, scale, slope)
    assert (by_jacobian.dtype, by_scale.dtype) == types


@pytest.mark.parametrize("types", TYPES, ids=str)
def test_a_compiler_is_told_types_shapes_and_strides(types):
    check_promises(types, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("types", TYPES, ids=str)
def test_a_compiler_is_told_those_of_the_card(types):
    check_promises(types, "cuda")
