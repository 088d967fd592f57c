"""Dropout that can be told its masks, in any module, without changing the module.

Every dropout of a forward pass, module or functional, goes through `torch.nn.functional`. A
`TorchFunctionMode` catches those calls while the network itself stays in whatever mode it is in, so
that batch norm is never touched by switching dropout on, and `F.dropout(x, training=self.training)` in
someone's `forward` is not silently inactive at prediction time.

Rows are folded sample-major: row `s * n + i` is example `i` under Monte Carlo sample `s`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stfseb.errors import StfsebError
from stfseb.networks.inner_dropout import inner_rate, without_inner
from stfseb.networks.layout import Pass
from stfseb.networks.views import refuse_lost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DROPOUT_MODULES = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)

_ELEMENT = (F.dropout, torch.dropout, torch.dropout_)
_CHANNEL = (F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout, torch.feature_dropout_)
_REFUSED = (
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.alpha_dropout,
    torch.alpha_dropout_,
    torch.feature_alpha_dropout,
    torch.feature_alpha_dropout_,
)


@dataclass(frozen=True)
class Block:
    """Consecutive rows of a batch whose masks are drawn alike.

    `shared` rows see one mask per sample, so that their outputs are one draw of the network as a
    function; the others draw a mask each. `generator` is torch's default one when it is None.
    """

    rows: int
    shared: bool
    generator: torch.Generator | None = None


class PrefixHasDropoutError(Exception):
    """A dropout ran in the part of a chain that was taken to have none."""


class Lanes(NamedTuple):
    """Random bits for one mask: integers of 8 or 16 bits, uniform over their whole range."""

    shape: tuple[int, ...]
    rate: float

    @property
    def levels(self) -> int:
        """Return 256 where the rate is a multiple of 1/256, else 65536."""
        return 256 if (self.rate * 256.0).is_integer() else 65536

    @property
    def words(self) -> int:
        """Return how many 64-bit words hold the lanes."""
        lanes = 8 if self.levels == 256 else 4
        return -(-math.prod(self.shape) // lanes)

    def cut(self, words: Tensor) -> Tensor:
        """Return the lanes of 64-bit words, in the mask's shape."""
        lane = torch.int8 if self.levels == 256 else torch.int16
        return words.view(lane)[: math.prod(self.shape)].view(self.shape)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # compilers mistake the size of the lanes
    def draw(self, device: torch.device, generator: torch.Generator | None) -> Tensor:
        """Draw the lanes."""
        return self.cut(random_words(self.words, device, generator))

    def mask(self, lanes: Tensor, dtype: torch.dtype) -> Tensor:
        """Return zeros and 1 / (1 - rate) with P(0) = rate.

        With 16 bits the rate is rounded to a multiple of 2^-16 and the scale follows the rounded rate, so
        that the mask's mean is exactly one. A mask that is there already (floating point: the input or a
        constant of an exported graph) stays as it is.
        """
        if lanes.is_floating_point():
            return lanes
        dropped = min(round(self.rate * self.levels), self.levels - 1)
        keep = lanes >= dropped - self.levels // 2
        return keep.to(dtype) * (self.levels / (self.levels - dropped))


def random_words(count: int, device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """Draw 64-bit words over their whole range (torch's default range leaves the sign bit 0)."""
    words = torch.empty(count, dtype=torch.int64, device=device)
    return words.random_(-(2**63), None, generator=generator)


def keep_mask(
    shape: Sequence[int], rate: float, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None
) -> Tensor:
    """Draw a mask of zeros and 1 / (1 - rate) with P(0) = rate.

    torch draws a random number per element (on the CPU in one thread). Here every 64-bit word is cut into
    lanes that are compared with a threshold: about a twentieth of the time on the CPU.
    """
    lanes = Lanes(tuple(shape), rate)
    return lanes.mask(lanes.draw(device, generator), dtype)


class MonteCarloDropout(Pass):
    """Make every dropout of the forward pass active, with masks laid out over `samples` and `blocks`.

    With `folded=False` the batch has one row an example until the first dropout, whose output has
    `samples` rows an example: what comes before it runs once. `rates` collects the rates that were seen, and
    `plan` the masks that were asked for. Masks come from `lanes` where an engine has drawn them beforehand.
    """

    def __init__(
        self,
        samples: int,
        blocks: Sequence[Block],
        *,
        folded: bool,
        lanes: Sequence[Tensor] | None = None,
        laid_out: bool = False,
    ) -> None:
        super().__init__(laid_out=laid_out)
        self.lanes = lanes
        self.plan: list[Lanes] = []
        self.samples = samples
        self.blocks = tuple(block for block in blocks if block.rows)
        self.rows = sum(block.rows for block in self.blocks)
        self.folded = folded
        self.in_prefix = False
        self.rates: set[float] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Redirect dropout; let everything else through."""
        kwargs = kwargs or {}
        if func in _ELEMENT:
            return self._dropout(*_arguments(args, kwargs), channelwise=False)
        if func in _CHANNEL:
            return self._dropout(*_arguments(args, kwargs), channelwise=True)
        _refuse(func, args, kwargs)
        return self.call(func, args, kwargs)

    def _dropout(self, x: Tensor, rate: float, inplace: bool, *, channelwise: bool) -> Tensor:
        if self.in_prefix:
            raise PrefixHasDropoutError
        if rate:
            self.once()
        if self.lost(F.dropout, (x,), {}):
            refuse_lost()
        self.rates.add(rate)
        samples = self.samples if self.folded else 1
        lead = samples * self.rows
        if x.shape[0] % lead:
            raise StfsebError(
                f"dropout on a tensor of shape {tuple(x.shape)} in a batch of {lead} rows: "
                "its first dimension must be the batch (or a multiple of it); use batch-first layouts"
            )
        # Channels-last tensors keep their layout: the product is taken on the permuted, contiguous view.
        last = x.ndim == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
        flat = x.permute(0, 2, 3, 1) if last else x
        inner = [x.shape[0] // lead, *flat.shape[1:]]
        if channelwise:
            inner[2:] = [1] * (x.ndim - 2)
            if last:
                inner[1:] = [1, 1, x.shape[1]]
        mask = self._mask(tuple(inner), rate, x, last=last)
        spread = flat.reshape(samples, self.rows, x.shape[0] // lead, *flat.shape[1:])
        if samples < self.samples:
            spread = _Repeated.apply(spread, self.samples)  # type: ignore[no-untyped-call]
        if inplace and self.folded:
            return x.copy_(
                (spread * mask).reshape(flat.shape).permute(0, 3, 1, 2) if last else (spread * mask).view_as(x)
            )
        self.folded = True
        out = (spread * mask).flatten(0, 2)
        return out.permute(0, 3, 1, 2) if last else out

    def _mask(self, inner: tuple[int, ...], rate: float, x: Tensor, *, last: bool) -> Tensor:
        """Return the mask (samples, rows, *inner), or with one row if a single block shares it.

        Shared masks, and on the CPU all, are drawn in the order (channels, height, width) for every layout: a seed
        then gives the same function whether or not a network has been moved to channels last, before or after it was
        saved.
        """
        if rate == 1.0:
            return x.new_zeros((self.samples, 1, *inner))
        parts = []
        for block in self.blocks:
            turned = last and (block.shared or x.device.type == "cpu")
            shape = (inner[0], inner[3], inner[1], inner[2]) if turned else inner
            wanted = Lanes((self.samples, 1 if block.shared else block.rows, *shape), rate)
            drawn = wanted.draw(x.device, block.generator) if self.lanes is None else self.lanes[len(self.plan)]
            self.plan.append(wanted)
            mask = wanted.mask(drawn, x.dtype)
            parts.append(mask.permute(0, 1, 2, 4, 5, 3) if turned else mask)
        if len(parts) == 1:
            return parts[0]
        return torch.cat(
            [part.expand(-1, block.rows, *inner) for part, block in zip(parts, self.blocks, strict=True)], dim=1
        )


class _Repeated(torch.autograd.Function):
    """One row for all samples; its gradient is their sum, taken sample by sample.

    Written as a chain of additions, which a compiler turns into one pass over what it reads; the sum that
    `expand` would take becomes a reduction over few, far apart elements, several times slower on the card.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, samples: int) -> Tensor:
        """Return x (1, ...) as (samples, ...)."""
        del ctx
        return x.expand(samples, *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the sum over samples, in float32 if the gradient is in half precision."""
        del ctx
        first, *others = gradients[0].unbind(0)
        total = first.float() if first.dtype in (torch.bfloat16, torch.float16) else first
        for part in others:
            total = total + part
        return total.to(first.dtype).unsqueeze(0), None


class NoDropout(Pass):
    """Make every dropout of the forward pass the identity, whatever mode the network is in.

    `substituted` says that the pass runs with other tensors in the place of the network's weights.
    """

    def __init__(self, *, laid_out: bool = False, substituted: bool = False) -> None:
        super().__init__(laid_out=laid_out)
        self.substituted = substituted

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return dropout's input; let everything else through."""
        kwargs = kwargs or {}
        dropout = func in _ELEMENT or func in _CHANNEL or func in _REFUSED
        inner = 0.0 if dropout else inner_rate(func, args, kwargs)
        if self.substituted or inner or (dropout and _draws(args, kwargs)):
            self.once()
        if dropout:
            return args[0] if args else kwargs["input"]
        if inner:
            args, kwargs = without_inner(func, args, kwargs)
        return self.call(func, args, kwargs)


def module_rates(net: nn.Module) -> set[float]:
    """Return the rates of all dropout modules; refuse dropout that cannot be given masks."""
    rates = set()
    for name, module in net.named_modules():
        if isinstance(module, DROPOUT_MODULES):
            rates.add(float(module.p))
        elif isinstance(module, nn.AlphaDropout | nn.FeatureAlphaDropout):
            raise StfsebError(f"layer '{name}' is {type(module).__name__}, which is not supported: use nn.Dropout")
        elif isinstance(module, nn.RNNBase | nn.MultiheadAttention) and module.dropout:
            raise StfsebError(
                f"layer '{name}' ({type(module).__name__}) has dropout={module.dropout} inside, where it cannot "
                "be given masks: set it to 0 and put an nn.Dropout behind the layer"
            )
    return rates


def named_rates(net: nn.Module) -> dict[str, float]:
    """Return the dropout rates of a network by name: of dropout modules, and of numbers that are called dropout.

    The second are what a `forward` with `F.dropout(x, self.dropout)` takes its rate from, as far as one can see
    without a pass.
    """
    rates: dict[str, float] = {}
    for name, module in net.named_modules():
        if isinstance(module, DROPOUT_MODULES):
            rates[name] = float(module.p)
        for key, value in vars(module).items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if "dropout" in key.lower() and number and 0 <= value <= 1:
                rates[f"{name}.{key}".lstrip(".")] = float(value)
    return rates


def check_has_dropout(net: nn.Module) -> None:
    """Raise unless the network has a dropout module or a `forward` that speaks of dropout."""
    if module_rates(net) or any("dropout" in name.lower() for name in _names_in_forwards(net)):
        return
    raise StfsebError(
        f"{type(net).__name__} has no dropout, so Monte Carlo dropout would draw the same function every time: "
        "add nn.Dropout layers (nn.Dropout(0.0) counts), or use MAP, MFVI or FSEB"
    )


def _names_in_forwards(net: nn.Module) -> set[str]:
    """Return the names that the modules' own forwards use, and those of functions that they call."""
    names: set[str] = set()
    waiting = [type(m).forward for m in net.modules() if not type(m).__module__.startswith("torch.")]
    seen: set[int] = set()
    while waiting:
        function: Any = waiting.pop()
        code = getattr(function, "__code__", None)
        if code is None or id(code) in seen:
            continue
        seen.add(id(code))
        names.update(code.co_names)
        called = [getattr(function, "__globals__", {}).get(name) for name in code.co_names]
        waiting += [f for f in called if callable(f) and not str(getattr(f, "__module__", "")).startswith("torch")]
    return names


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, float, bool]:
    """Return input, rate and in-place flag of any dropout call (`training` is overruled)."""
    x = args[0] if args else kwargs["input"]
    rate = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    return x, float(rate), bool(args[3] if len(args) > 3 else kwargs.get("inplace", False))


def _draws(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether torch would drop anything in a dropout call."""
    training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
    return bool(training) and _arguments(args, kwargs)[1] > 0


def _refuse(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if func in _REFUSED:
        raise StfsebError(f"{func.__name__} in the network is not supported: use nn.Dropout")
    if rate := inner_rate(func, args, kwargs):
        raise StfsebError(
            f"{func.__name__} with a dropout rate of {rate:g}: dropout inside of it cannot be given masks; "
            "set it to 0 and put an nn.Dropout behind the layer"
        )
