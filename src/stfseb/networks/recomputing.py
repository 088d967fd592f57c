"""Activation checkpointing, which runs parts of a network a second time in the backward pass.

By then the pass is over: dropout draws torch's own masks, and weights that were put in the place of a network's are
gone. Gradients would be those of another function, without a word.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from stfseb.errors import StfsebError

if TYPE_CHECKING:
    from types import FrameType


def refuse_recomputed() -> None:
    """Raise if the code that is running was called through `torch.utils.checkpoint`."""
    checkpoint = sys.modules.get("torch.utils.checkpoint")
    if checkpoint is None:
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == checkpoint.__file__:
            raise StfsebError(
                "the network recomputes activations (torch.utils.checkpoint), and in the backward pass it would know "
                "neither the step's masks nor its weights: switch its checkpointing off, or lower the batch size"
            )
        frame = frame.f_back
