"""Dropout inside torch's own calls: attention and recurrent layers, which draw masks where nobody can give them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

# Where `dropout_p` stands among the positional arguments.
_ATTENTION = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}
_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


def inner_rate(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Return the rate at which a call would drop inside of itself; 0 for all other calls."""
    if func in _ATTENTION:
        at = _ATTENTION[func]
        rate = args[at] if len(args) > at else kwargs.get("dropout_p", 0.0)
        return float(rate) if kwargs.get("training", True) else 0.0
    if func in _RECURRENT and (place := _recurrent_rate(args)) is not None:
        rate, layers, training = args[place], args[place - 1], args[place + 1]
        return float(rate) if training and layers > 1 else 0.0
    return 0.0


def without_inner(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the same call with no dropout inside."""
    place = _ATTENTION.get(func) or _recurrent_rate(args)
    if place is None or len(args) <= place:
        return args, {**kwargs, "dropout_p": 0.0}
    return (*args[:place], 0.0, *args[place + 1 :]), kwargs


def _recurrent_rate(args: tuple[Any, ...]) -> int | None:
    """Return where the rate stands: behind has_biases, the first of the flags, and num_layers."""
    return next((index + 2 for index, value in enumerate(args) if isinstance(value, bool)), None)
