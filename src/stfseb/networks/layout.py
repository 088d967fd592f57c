"""How a network's calls lie in memory: the same numbers, laid out as the processor likes them.

All of it happens to the calls of one pass. In every pass, on any device (`Pass`):

- `view` is `reshape`: a network that flattens by `x.view(len(x), -1)` need not know how a convolution's output lies.
  Where that makes a copy, one of the two is then written to and the other read, the pass ends in an error. (What is
  written through `.data`, in inference mode or to what the network returns goes unnoticed, so does `x.tolist()`.)

On a CPU, in chains of layers that take any layout (`Pass(laid_out=True)`):

- a convolution gets its input channels last, and so do the layers behind it. For 128 rows of 28x28 with 32 channels,
  one thread of a processor with AVX2, max-pooling takes a twelfth of the time forward and half of it with its
  gradient, a first convolution of one channel a tenth. Other networks stay as they are: they may rely on how
  their tensors lie.

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

from stfseb.networks.recomputing import refuse_recomputed
from stfseb.networks.views import CopiedViews, flat, refuse_lost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_FEW = 8
_CONVOLUTIONS = (F.conv2d, torch.conv2d)
_ON_CPU = (torch.float32, torch.bfloat16)  # double precision, which torch convolves by other code, stays as it is
_ENOUGH = 8192  # places (rows x height x width) below which laying out costs more than it brings
_ANY_LAYOUT = (
    *(nn.Conv2d, nn.BatchNorm2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Flatten, nn.Linear),
    *(nn.Dropout, nn.Dropout2d, nn.ReLU, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Identity),
)


def takes_any_layout(modules: Sequence[nn.Module]) -> bool:
    """Tell whether a chain of modules is made of layers for which only the speed depends on the layout."""
    return all(
        type(module) in _ANY_LAYOUT and not hooked(module) and getattr(module, "groups", 1) == 1 for module in modules
    )


def hooked(module: nn.Module) -> bool:
    """Tell whether something listens to the module's calls, so that they cannot be replaced."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


class Pass(TorchFunctionMode):
    """The calls of one pass of a network; what derives from it makes those it does not change by `call`."""

    def __init__(self, *, laid_out: bool = False) -> None:
        super().__init__()
        self.laid_out = laid_out
        self.views = CopiedViews()
        self.graded = torch.is_grad_enabled()

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call as described above."""
        lost = self.lost(func, args, kwargs)
        out = self._made(func, args, kwargs)
        if lost and any(isinstance(one, Tensor) for one in flat([out])):  # else it was a shape, say, that was read
            refuse_lost()
        return out

    def lost(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Tell whether a call reads what a copied view has lost."""
        return bool(self.views.all) and _may_choose() and self.views.lost(func, args, kwargs)

    def once(self) -> None:
        """Refuse to make a call that the backward pass would make again, when this pass is over."""
        if self.graded and not torch.compiler.is_compiling():
            refuse_recomputed()

    def _made(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is Tensor.view and not isinstance(args[-1], torch.dtype) and "dtype" not in kwargs:
            return self._viewed(args[0], Tensor.reshape(*args, **({"shape": kwargs["size"]} if kwargs else {})))
        if func is Tensor.view_as:
            return self._viewed(args[0], Tensor.reshape_as(*args, **kwargs))
        if self.laid_out and func in _CONVOLUTIONS and args and _may_choose():
            args = (_last_on_cpu(args[0]), *args[1:])
        return func(*args, **kwargs)

    def _viewed(self, x: Tensor, out: Tensor) -> Tensor:
        if _may_choose():
            self.views.record(x, out)
        return out


def _may_choose() -> bool:
    """Tell whether there is memory to lay out: not under vmap or jvp, and not where a graph is made."""
    return not torch.compiler.is_compiling() and peek_interpreter_stack() is None


def _last_on_cpu(x: Tensor) -> Tensor:
    places = x.numel() // max(1, x.shape[1]) if x.ndim == 4 else 0
    if places < _ENOUGH or x.device.type != "cpu" or x.dtype not in _ON_CPU:
        return x
    if x.shape[1] == 1:  # lies both ways; its strides say which
        return x.squeeze(1).unsqueeze(-1).permute(0, 3, 1, 2)
    return x.contiguous(memory_format=torch.channels_last)


@contextmanager
def layout_kept(net: nn.Module) -> Iterator[None]:
    """Lay plain weights out plainly again in the end: whoever calls the network next may `view` what it returns.

    With them their gradients: torch's fused optimisers go through both side by side.
    """
    were = [(parameter, parameter.is_contiguous()) for parameter in net.parameters()]
    try:
        yield
    finally:
        for parameter, plain in were:
            if plain:
                parameter.data = parameter.data.contiguous()
                if parameter.grad is not None and parameter.grad.layout is torch.strided:
                    parameter.grad = parameter.grad.contiguous()


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
