"""How a network's calls lie in memory: the same numbers, laid out as the processor likes them.

All of it happens to the calls of one pass, never to the network. Every pass, on any device (`let_through`):

- a convolution on a CPU gets its input channels last, and so do the layers behind it: torch's max-pooling is ten
  times faster there, a first convolution of one channel too;
- `view` is `reshape`: a network that flattens by `x.view(len(x), -1)` need not know how a convolution's output lies.

In bf16 on a GPU (`CardLayout`):

- convolutions run channels last; inputs of fewer than 8 channels are padded with zero channels to 8;
- the weights' gradient of a convolution with 32 input channels is computed on 64, of which half are zero:
  for 32, cuDNN falls back to a kernel of an older generation that is four times slower;
- 2x2 max-pooling keeps which of the four was largest in one byte, so that its backward pass reads that byte
  and not the convolution's output again.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_FEW = 8
_CONVOLUTIONS = (F.conv2d, torch.conv2d)
_ON_CPU = (torch.float32, torch.bfloat16)  # double precision, which torch convolves by other code, stays as it is


def let_through(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a call of a pass as described above."""
    if func is Tensor.view and not isinstance(args[-1], torch.dtype) and "dtype" not in kwargs:
        return Tensor.reshape(*args, **({"shape": kwargs["size"]} if kwargs else {}))
    if func is Tensor.view_as:
        return Tensor.reshape_as(*args, **kwargs)
    if func in _CONVOLUTIONS and args and _may_choose():
        args = (_last_on_cpu(args[0]), *args[1:])
    return func(*args, **kwargs)


def _may_choose() -> bool:
    """Tell whether a layout can be chosen: not under vmap or jvp, and in a graph it is for others to choose."""
    return not torch.compiler.is_compiling() and peek_interpreter_stack() is None


def _last_on_cpu(x: Tensor) -> Tensor:
    if x.ndim != 4 or x.device.type != "cpu" or x.dtype not in _ON_CPU:
        return x
    if x.shape[1] == 1:  # lies both ways; its strides say which
        return x.reshape(len(x), *x.shape[2:], 1).permute(0, 3, 1, 2)
    return x.contiguous(memory_format=torch.channels_last)


@contextmanager
def layout_kept(net: nn.Module) -> Iterator[None]:
    """Lay the network's weights out in the end as they were: whoever calls it next may `view` what it returns."""
    were = [(parameter, parameter.is_contiguous()) for parameter in net.parameters()]
    try:
        yield
    finally:
        for parameter, plain in were:
            if plain:
                parameter.data = parameter.data.contiguous()


class CardLayout(TorchFunctionMode):
    """Run two-dimensional convolutions and max-pooling of a bf16 pass as described above."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Redirect conv2d and max_pool2d; let everything else through."""
        kwargs = kwargs or {}
        if func in _CONVOLUTIONS:
            return _conv2d(func, *args, **kwargs)
        if func in (F.max_pool2d, torch.max_pool2d) and halves(*args, **kwargs):
            pooled: Tensor = MaxPool2x2.apply(args[0].permute(0, 2, 3, 1))  # type: ignore[no-untyped-call]
            return pooled.permute(0, 3, 1, 2)
        return func(*args, **kwargs)


def _conv2d(
    func: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any, **named: Any
) -> Tensor:
    given = dict(zip(("stride", "padding", "dilation", "groups"), rest, strict=False)) | named
    stride, padding, dilation = given.get("stride", 1), given.get("padding", 0), given.get("dilation", 1)
    groups = given.get("groups", 1)
    if x.ndim != 4 or groups != 1 or isinstance(padding, str):
        return func(x, weight, bias, *rest, **named)
    x, weight = x.to(torch.bfloat16), weight.to(torch.bfloat16)
    channels = weight.shape[1]
    if channels < _FEW:
        extra = (0, 0, 0, 0, 0, _FEW - channels)
        x, weight = F.pad(x, extra), F.pad(weight, extra)
    x = x.contiguous(memory_format=torch.channels_last)
    weight = weight.contiguous(memory_format=torch.channels_last)
    bias = None if bias is None else bias.to(torch.bfloat16)
    stride, padding, dilation = _pair(stride), _pair(padding), _pair(dilation)
    if channels % 64 == 32:
        out: Tensor = PaddedWeightGradient.apply(x, weight, stride, padding, dilation)  # type: ignore[no-untyped-call]
        out = out if bias is None else out + bias[:, None, None]
    else:
        out = F.conv2d(x, weight, bias, stride, padding, dilation)
    return out.contiguous(memory_format=torch.channels_last)


class PaddedWeightGradient(torch.autograd.Function):
    """A convolution whose weights' gradient is taken with 32 more, empty, input channels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any) -> Tensor:
        """Convolve."""
        ctx.save_for_backward(x, weight)
        ctx.settings = (stride, padding, dilation)
        return F.conv2d(x, weight, None, stride, padding, dilation)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of input and weights."""
        x, weight = ctx.saved_tensors
        stride, padding, dilation = ctx.settings
        grad = gradients[0].contiguous(memory_format=torch.channels_last)
        shared = (None, stride, padding, dilation, False, [0, 0], 1)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.ops.aten.convolution_backward(grad, x, weight, *shared, [True, False, False])[0]
        extra = (0, 0, 0, 0, 0, 32)
        wide = F.pad(x, extra).contiguous(memory_format=torch.channels_last)
        wide_weight = F.pad(weight, extra).contiguous(memory_format=torch.channels_last)
        grad_weight = torch.ops.aten.convolution_backward(grad, wide, wide_weight, *shared, [False, True, False])[1]
        return grad_x, grad_weight[:, : weight.shape[1]], None, None, None


class MaxPool2x2(torch.autograd.Function):
    """2x2 max-pooling of (N, H, W, C); the first of equal values wins, NaN always does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the largest of each four."""
        n, h, w, c = x.shape
        four = x.reshape(n, h // 2, 2, w // 2, 2, c)
        best = four[:, :, 0, :, 0]
        which = torch.zeros_like(best, dtype=torch.int8)
        for place, (i, j) in enumerate(((0, 1), (1, 0), (1, 1)), 1):
            other = four[:, :, i, :, j]
            better = (other > best) | other.isnan()
            best = torch.where(better, other, best)
            which = torch.where(better, place, which).to(torch.int8)
        ctx.save_for_backward(which)
        return best

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Send each gradient to the place it came from."""
        (which,) = ctx.saved_tensors
        n, h, w, c = which.shape
        places = torch.arange(4, device=which.device, dtype=torch.int8).view(2, 1, 2, 1)
        chosen = which[:, :, None, :, None] == places
        spread = torch.where(chosen, gradients[0][:, :, None, :, None], 0.0)
        return spread.reshape(n, 2 * h, 2 * w, c).to(gradients[0].dtype)


def halves(
    x: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, *rest: Any, **named: Any
) -> bool:
    """Tell whether a pooling call is 2x2 with stride 2 on even sides."""
    plain = not any(rest) and not named.get("ceil_mode") and not named.get("return_indices")
    sizes = _pair(kernel_size), _pair(kernel_size if stride is None else stride), _pair(padding), _pair(dilation)
    even = x.ndim == 4 and x.shape[2] % 2 == 0 and x.shape[3] % 2 == 0
    return plain and even and sizes == ([2, 2], [2, 2], [0, 0], [1, 1])


def _pair(value: Any) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)
