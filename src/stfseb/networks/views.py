"""Views that had to be copies because of how a tensor lies, and what would be lost by that.

`x.view(len(x), -1)` shares its elements with x. Where x lies channels last it cannot, and a copy stands in for it: as
good, unless one of the two is written to and the other read afterwards. `CopiedViews` notices that. It looks closely
only where something was written to, so a pass that does not write in place pays for a few comparisons of addresses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stfseb.errors import StfsebError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# What a call takes of its first argument, or of all others than that, is its shape or its kind and not its elements.
_SHAPE_OF_OTHERS = ("type_as", "view_as", "expand_as", "reshape_as")
_OVERWRITTEN = ("zero_", "fill_", "copy_")


class CopiedViews:
    """The copies that stand in for views in one pass of a network."""

    def __init__(self) -> None:
        self.all: list[_Copied] = []

    def record(self, x: Tensor, out: Tensor) -> None:
        """Take note of a view, if it is a copy."""
        if x.is_inference() or out.is_inference():  # their writes are not counted
            return
        places = address(x), address(out)
        if None not in places and places[0] != places[1]:
            self.all.append(_Copied(x, x._version, places[0], out, out._version, places[1]))

    def lost(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Tell whether a call reads something that would be otherwise if copied views were views."""
        name = getattr(func, "__name__", "")
        if name.endswith("_like") or name.startswith("new_"):
            return False
        given = list(args[:1] if name in _SHAPE_OF_OTHERS else args[1:] if name in _OVERWRITTEN else args)
        given += [value for key, value in kwargs.items() if key != "out"]
        return any(self._stale(one) for one in flat(given) if isinstance(one, Tensor))

    def _stale(self, read: Tensor) -> bool:
        where = address(read)
        for one in self.all:
            if where == one.copy_at:  # stale where its original was written to, or another copy of that
                others = (o for o in self.all if o is not one and o.of_at == one.of_at and o.copy_written)
                if one.original_written() or any(_overlap(o.of, one.of) for o in others):
                    return True
            elif where == one.of_at and one.copy_written and _overlap(one.of, read):
                return True
        return False


@dataclass
class _Copied:
    """A tensor that was viewed and its copy, each with how often it had been written to by then and its address."""

    of: Tensor
    of_was: int
    of_at: int | None
    copy: Tensor
    copy_was: int
    copy_at: int | None

    @property
    def copy_written(self) -> bool:
        """Tell whether the copy was written to since."""
        return self.copy._version != self.copy_was

    def original_written(self) -> bool:
        """Tell whether what it is a copy of was. Tensors of one memory count their writes together: compare as well."""
        if self.of._version == self.of_was:
            return False
        if torch.equal(self.of.detach().reshape(self.copy.shape), self.copy):
            self.of_was = self.of._version
            return False
        return True


def refuse_lost() -> None:
    """Say what such a network should do instead."""
    raise StfsebError(
        "the network writes into a view of a tensor, or into the tensor, and reads the other again; laid out channels "
        "last that view is a copy: use reshape and go on with its result, or train with precision='float32'"
    )


def flat(values: Sequence[Any]) -> Iterator[Any]:
    """Yield values, those of lists and tuples one by one."""
    for value in values:
        yield from value if isinstance(value, list | tuple) else (value,)


def address(x: Tensor) -> int | None:
    """Return where a tensor's memory begins; None of a tensor that has none of its own (sparse, lazy, a wrapper)."""
    try:
        return x.untyped_storage().data_ptr() if x.layout is torch.strided else None
    except (RuntimeError, ValueError, NotImplementedError):
        return None


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors of one memory have elements in common, from their strides alone."""
    if one.dtype != other.dtype:
        return True
    marked = torch.zeros(one.untyped_storage().nbytes() // one.element_size(), dtype=torch.bool)
    marked.as_strided(one.size(), one.stride(), one.storage_offset()).fill_(True)
    return bool(marked.as_strided(other.size(), other.stride(), other.storage_offset()).any())
