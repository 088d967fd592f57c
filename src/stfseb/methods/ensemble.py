"""Deep ensembles: several members of any method, trained side by side, each sample from one of them.

The objective is the sum of the members' objectives: they share no parameters, so that each gets its own
gradient as if it were trained alone (on the same order of minibatches; initial weights, masks, weight samples
and context points differ). Terms in logs are sums over members.

Lakshminarayanan, Pritzel and Blundell, Simple and scalable predictive uncertainty estimation using deep
ensembles, NeurIPS 2017, https://arxiv.org/abs/1612.01474
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stfseb.errors import StfsebError
from stfseb.methods.base import Method, Terms
from stfseb.methods.context import generator
from stfseb.methods.registry import method_class
from stfseb.methods.settings import Settings
from stfseb.networks.registry import spec_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stfseb.likelihoods import Likelihood
    from stfseb.methods.context import Draw

_STREAM = 11  # of the members' seeds


@dataclass(frozen=True)
class EnsembleSettings(Settings):
    """Settings of `Ensemble`: each member's method and settings, as JSON knows them."""

    members: list[dict[str, Any]] = field(default_factory=list)
    samples: int = 1

    def __post_init__(self) -> None:
        if len(self.members) < 2:
            raise StfsebError(f"an ensemble of {len(self.members)}: give at least two members")


class Ensemble(Method):
    """A deep ensemble of any method.

    Args:
        members: methods around networks of their own (`Ensemble.of` makes them). They share the likelihood
            of the first. Prediction takes as many samples in turn from each; by default all that they take.
    """

    key = "ensemble"
    label = "Deep ensemble"
    settings_type = EnsembleSettings
    settings: EnsembleSettings

    def __init__(self, members: Sequence[Method]) -> None:
        members = list(members)
        _check(members)
        described = [{"method": member.key, "settings": member.settings.as_dict()} for member in members]
        settings = EnsembleSettings(described, sum(member.samples for member in members))
        for member in members:
            member.likelihood = members[0].likelihood
        super().__init__(nn.ModuleList(members), settings, members[0].likelihood)
        spans = [member.seen.span for member in members if member.seen.span is not None]
        if spans:
            self.seen.learn((min(low for low, _ in spans), max(high for _, high in spans)))
        specs = [spec_of(member.net) for member in members]
        if all(isinstance(spec, dict) for spec in specs):
            self.net.spec = {"network": "list", "members": specs}  # type: ignore[assignment]
        if members[0].key != "map":
            self.__dict__["label"] = f"{type(self).label} ({members[0].label})"

    @classmethod
    def of(cls, make: Callable[[int], Method], count: int = 5) -> Ensemble:
        """Return the ensemble of make(0), ..., make(count - 1), each of which must start from weights of its own."""
        return cls([make(index) for index in range(count)])

    @classmethod
    def restore(cls, net: nn.Module, settings: EnsembleSettings, likelihood: Likelihood) -> Ensemble:
        """Return the ensemble around the networks in `net` (an `nn.ModuleList`, one for each member)."""
        count = len(settings.members)
        if not isinstance(net, nn.ModuleList) or len(net) != count:
            raise StfsebError(f"this model is an ensemble: give net=nn.ModuleList of {count} fresh networks")
        members = []
        for one, about in zip(net, settings.members, strict=True):
            kind = method_class(about["method"])
            members.append(kind.restore(one, kind.settings_type.from_dict(about["settings"]), copy.copy(likelihood)))
        return cls(members)

    @property
    def members(self) -> list[Method]:
        """Return the methods of the ensemble."""
        return [member for member in self.net.children() if isinstance(member, Method)]

    def objective(self, x: Tensor, y: Tensor, num_data: int, batch_size: int | None = None) -> Terms:
        """Return the sum of the members' terms."""
        return _sum([member.objective(x, y, num_data, batch_size) for member in self.members])

    def terms(self, x: Tensor, y: Tensor, draw: Draw | None, share: float, part: float) -> Terms:
        """Return the sum of the members' terms, for members without context points."""
        if self.uses_context:
            raise StfsebError("members draw context points of their own: call objective, not terms")
        return _sum([member.terms(x, y, draw, share, part) for member in self.members])

    @property
    def uses_context(self) -> bool:
        """Tell whether a member needs context points (each draws its own)."""
        return any(member.uses_context for member in self.members)

    @property
    def vectorised(self) -> bool:
        """Tell whether passes of a member run under vmap."""
        return any(member.vectorised for member in self.members)

    def prepare(self, x: Tensor, y: Tensor) -> None:
        """Prepare every member."""
        for member in self.members:
            member.prepare(x, y)

    def reseed(self, seed: int) -> None:
        """Give every member random streams of its own."""
        for index, member in enumerate(self.members):
            member.reseed(generator(seed, _STREAM, index).initial_seed() % 2**31)

    def outputs(self, x: Tensor) -> int:
        """Return the number of outputs, the same for every member."""
        found = {member.outputs(x) for member in self.members}
        if len(found) > 1:
            raise StfsebError(f"the members have {sorted(found)} outputs: give networks with equally many")
        self._outputs = found.pop()
        return self._outputs

    def shares(self, samples: int, seed: int) -> list[tuple[Method, int, int]]:
        """Return the members that give samples, how many each, and their seeds.

        Of fewer samples than members, the first members give one each.
        """
        each, extra = divmod(samples, len(self.members))
        counts = [each + (index < extra) for index in range(len(self.members))]
        # A seed for each member: equal masks or noise in all members would be no sample of the mixture.
        seeds = [generator(seed, _STREAM, index).initial_seed() for index in range(len(counts))]
        return [(m, n, s) for m, n, s in zip(self.members, counts, seeds, strict=True) if n]

    def _draw(self, x: Tensor, samples: int, seed: int) -> Tensor:
        """Concatenate the members' samples."""
        return torch.cat([member._draw(x, count, s) for member, count, s in self.shares(samples, seed)])


def _sum(terms: list[Terms]) -> Terms:
    return Terms(*(torch.stack(parts).sum() for parts in zip(*terms, strict=True)))


def _check(members: list[Method]) -> None:
    """Raise unless the members are methods with networks, and initial weights, of their own."""
    for index, member in enumerate(members):
        if not isinstance(member, Method):
            raise StfsebError(f"member {index} is {type(member).__name__}: give methods, such as MAP(net)")
        if member.likelihood.spec() != members[0].likelihood.spec():
            raise StfsebError(f"member {index} has another likelihood than member 0: give all the same")
    owners: dict[int, int] = {}
    for index, member in enumerate(members):
        for parameter in member.net.parameters():
            if owners.setdefault(id(parameter), index) != index:
                raise StfsebError(
                    f"members {owners[id(parameter)]} and {index} share a network: give each its own, "
                    "for example Ensemble.of(lambda i: MAP(make_network()))"
                )
