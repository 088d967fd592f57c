"""Context points: unlabelled images on which the function prior looks at the network's outputs.

Points are drawn without replacement until the set is used up, then in a new order. A draw is a function
of (seed, step) alone, so that a run can be resumed from its step, and so that several processes or
several parts of one step agree on the points and on their dropout masks without talking.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from stfseb.errors import DivergedError, StfsebError
from stfseb.function_prior import FunctionPrior
from stfseb.inputs import scaled
from stfseb.methods.context_set import TRAIN, as_context, with_copies
from stfseb.methods.memory import sized
from stfseb.methods.parallel import agree, processes
from stfseb.methods.steps import Step
from stfseb.networks.constant import detached, owner
from stfseb.networks.features import EXTRACTORS, Features, frozen_network

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_ROWS = {"cpu": 128}  # images at a time for h: more do not fit a core's caches and take twice as long there


def generator(seed: int, stream: int, index: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return the generator of one draw of one random stream (mixed by a 64-bit odd multiplier)."""
    mixed = (seed * 0x9E3779B97F4A7C15 + stream * 0xBF58476D1CE4E5B9 + index * 0x94D049BB133111EB) % 2**63
    return torch.Generator(device).manual_seed(mixed)


class ContextStream:
    """The order in which the points of a context set are used: `indices(step)`."""

    def __init__(self, count: int, num_context: int, seed: int = 0) -> None:
        if num_context > count:
            raise StfsebError(f"num_context={num_context} exceeds the {count} context images: lower it or give more")
        self.count = count
        self.num_context = num_context
        self.seed = seed
        self.step = 0
        self._cycle = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def indices(self, step: int, steps: int = 1) -> Tensor:
        """Return the points of `steps` steps from `step` on, one after the other.

        A step that spans two cycles takes the end of one and the start of the next.
        """
        start, wanted = step * self.num_context, steps * self.num_context
        parts = []
        taken = 0
        while taken < wanted:
            cycle, offset = divmod(start + taken, self.count)
            part = self._permutation(cycle)[offset : offset + wanted - taken]
            parts.append(part)
            taken += len(part)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @property
    def first(self) -> Tensor:
        """The order of the first cycle."""
        return self._permutation(0)

    def _permutation(self, cycle: int) -> Tensor:
        if cycle != self._cycle:
            self._order = torch.randperm(self.count, generator=generator(self.seed, 1, cycle))
            self._cycle = cycle
        return self._order


class Draw(NamedTuple):
    """The context of one step: images in the network's precision, their features, the generator of their masks.

    A training engine that factors many steps' Gram matrices at once hands the factor (and its inverse) along,
    or, with `spectrum`, eigenvectors as `factor` and eigenvalues as `spectrum`.
    """

    images: Tensor
    features: Tensor
    masks: torch.Generator | None = None
    factor: Tensor | None = None
    whitener: Tensor | None = None
    spectrum: Tensor | None = None

    def decomposed(self) -> Draw:
        """Return the draw with its eigen-decomposition, for a prior whose taus are learnt."""
        if self.spectrum is not None:
            return self
        factor, spectrum = FunctionPrior.decompose(self.features)
        return self._replace(factor=factor, spectrum=spectrum)

    def function_prior(self, tau1: Any, tau2: Any, dof: Any, **settings: Any) -> FunctionPrior:
        """Return the prior on the outputs at these points, from the factor where there is one."""
        if self.factor is not None and self.spectrum is not None:
            return FunctionPrior.from_spectrum(self.factor, self.spectrum, tau1, tau2, dof, **settings)
        if self.factor is None:
            prior = FunctionPrior(self.features, tau1, tau2, dof, **settings)
            # On a card it would wait for the device at every step; `fit` looks there once a term is not finite.
            on_host = self.features.device.type == "cpu" and not torch.compiler.is_compiling()
            if on_host and (failure := prior.failure()):
                raise DivergedError(failure)
            return prior
        direct = self.whitener is not None and self.factor.shape[-1] == len(self.images)
        features = None if direct else self.features
        return FunctionPrior.from_factor(
            self.factor, tau1, tau2, dof, features=features, whitener=self.whitener, **settings
        )


class Context(nn.Module):
    """A context set, the order in which its points are used, and their features h, computed once.

    On the CPU h is computed as far as steps have come in the first cycle, elsewhere for the whole set at once.

    Args:
        net: the network that is being trained; the extractor is copied from it now.
        context: images, or "train" for rows of the minibatch.
        num_context: points in each step.
        extractor: "init" (a frozen copy of `net`; "pretrained" is the same, of a network that comes with weights),
            "independent" (a copy initialised anew), "he" (anew by He's rule), a callable, or None where only the
            images are needed (features are then of width 0).
        layer: the layer whose output h is; None for the input of the last Linear.
        normalise: divide h by its root mean square norm.
        seed: of the order and of the masks; drawn from torch's default generator when None.
        copies: distorted copies of each image that join the set; see `stfseb.data.augmentation.distorted`.
    """

    images: Tensor | None
    cached: Tensor | None

    def __init__(
        self,
        net: nn.Module,
        context: Any,
        num_context: int,
        extractor: str | Callable[[Tensor], Tensor] | None = "init",
        layer: str | None = None,
        normalise: bool = False,
        seed: int | None = None,
        copies: int = 0,
    ) -> None:
        super().__init__()
        checked = as_context(context)
        self.given = 0 if isinstance(checked, str) else len(checked)  # the first images; copies come after them
        if copies:
            checked = with_copies(checked, copies)
        self.num_context = num_context
        self.normalise = normalise
        self.layer = layer
        self.seed = int(torch.randint(2**31, ())) if seed is None else seed
        self.step = 0
        self._parts = Step()
        self._whole: Tensor | None = None  # the rows of the step whose parts these are, and those of the next step
        self._coming: Tensor | None = None
        self._agreed = False
        self._reached = 0  # points of the first cycle whose h is in `cached`
        self._extractor: Features | None = None
        # In tuples, so that extractors are no submodules: nothing of theirs is trained or saved.
        self._frozen = (frozen_network(net, extractor, self.seed) if isinstance(extractor, str) else None,)
        given = None if isinstance(extractor, str) else extractor
        self._callable = (None if given is None else detached(given, net),)
        # What is no module's own cannot be copied: h of all points at once, so that it does not follow the training.
        self.at_once = given is not None and owner(given) is None
        self.images_only = extractor is None
        self.register_buffer("images", None if isinstance(checked, str) else checked, persistent=False)
        self.register_buffer("cached", None, persistent=False)
        self.stream: ContextStream | None = None
        if isinstance(checked, Tensor):
            self.stream = ContextStream(len(checked), num_context, self.seed)
            if not self.images_only:
                self._make_extractor(scaled(checked[:1], next(net.parameters())))

    @classmethod
    def of(cls, net: nn.Module, context: Any, extractor: Any, settings: Any) -> Context:
        """Return the context of a method whose settings say all about it but the images and the extractor."""
        if not (isinstance(extractor, str) or callable(extractor)):
            names = ", ".join(f"'{name}'" for name in EXTRACTORS)
            raise StfsebError(f"extractor={extractor}: give {names}, or a callable from images to features")
        s = settings
        return cls(net, context, s.num_context, extractor, s.features, s.normalise_features, copies=s.context_copies)

    @property
    def originals(self) -> Tensor | None:
        """The images as they were given, without distorted copies."""
        return self.images if self.images is None or self.given == len(self.images) else self.images[: self.given]

    def reseed(self, seed: int) -> None:
        """Restart the order of the points and their masks."""
        self.seed, self.step = seed, 0
        self._parts.end()
        if self.stream is not None:
            if self._reached < self.stream.count:  # in an order that is no more
                self.cached, self._reached = None, 0
            self.stream = ContextStream(self.stream.count, self.num_context, seed)

    @torch.no_grad()
    def take_over(self, other: Context, like: Tensor) -> None:
        """Take another set's images and features of the same shapes, in place."""
        if self.images is not None and other.images is not None:
            self.images.copy_(other.images)
            if self.cached is not None:  # else there is no function term
                self.features(like).copy_(other.features(like))

    def begin_parts(self, whole: Tensor | None = None) -> None:
        """Say that the next call of the objective is the first part of a new step.

        Steps of accumulated gradients or of several processes are told apart without it, but for `context="train"`:
        there the points are rows of the whole step, which its parts do not have. Give them all as `whole`, the same in
        every process; they hold until the step is over.
        """
        self._whole, self._coming = None, whole
        self._parts.end()

    def next(self, x: Tensor, whole: int | None = None, parameters: Sequence[Tensor] = ()) -> Draw:
        """Return the context of the next step.

        Where `x` is a part of a step of `whole` rows, the draw stays until the step is over; see `Step`.
        """
        self._agree(x)
        first = self._parts.begins(len(x), whole, parameters)
        if first:
            self._whole, self._coming = self._coming, None
        if self.images is None and self._whole is None and whole is not None and len(x) < whole:
            self._parts.end()
            raise StfsebError(
                f"context='{TRAIN}' with {len(x)} rows of a step of batch_size={whole}: the points are rows of the "
                "whole step, so call context.begin_parts(x of the whole step) before its first part; of a smaller last "
                "step give batch_size=len(x)"
            )
        self.step += first
        return self.draw(x, self.step - 1)

    def _agree(self, x: Tensor) -> None:
        """Take the first process's seed and extractor, once, where processes train one network together."""
        group = None if self._agreed else processes()
        if group is None:
            return
        self._agreed = True
        module = None
        if not self.images_only:
            example = x[:1] if self.images is None else scaled(self.images[:1], x)
            module = owner(self._make_extractor(example).source)
        # Modulo 2^63, as `generator` takes them.
        seed, step = agree(group, [self.seed % 2**63, self.step], module, x.device)
        if seed != self.seed % 2**63:
            self.reseed(seed)
        self.step = step
        if module is not None:
            self.cached, self._reached = None, 0

    def draw(self, x: Tensor, step: int) -> Draw:
        """Return the context of step `step` for the minibatch `x`, a function of the seed and the step."""
        masks = generator(self.seed, 2, step, x.device)
        if self.images is None or self.stream is None:
            rows = x if self._whole is None else self._whole
            chosen = torch.randperm(len(rows), generator=generator(self.seed, 1, step))[: self.num_context]
            images = scaled(rows[chosen.to(rows.device)].detach(), x)
            if self.images_only:
                return Draw(images, x.new_empty(len(images), 0), masks)
            return Draw(images, self._normalised(self._make_extractor(images[:1])(images)), masks)
        chosen = self.stream.indices(step).to(x.device)
        images = scaled(self.images[chosen.to(self.images.device)], x)
        if images.shape[1:] != x.shape[1:]:
            raise StfsebError(
                f"context images have shape {tuple(images.shape[1:])} but the training images "
                f"{tuple(x.shape[1:])}: give images of one shape"
            )
        return Draw(images, self._features_up_to((step + 1) * self.num_context, x)[chosen], masks)

    def features(self, like: Tensor) -> Tensor:
        """Return h for the whole context set, (count, p), on the device and in the precision of `like`."""
        assert self.images is not None
        return self._features_up_to(len(self.images), like)

    def _features_up_to(self, points: int, like: Tensor) -> Tensor:
        """Return h, (count, p), in which at least the first `points` points of the first cycle are filled in."""
        assert self.images is not None
        assert self.stream is not None
        count = len(self.images)
        # A norm is of the whole set.
        if self.images_only or self.normalise or self.at_once or like.device.type != "cpu":
            points = count
        if self.cached is None and points >= count:
            self.cached = like.new_empty(count, 0) if self.images_only else self.extract(self.images, like)
            self._reached = count
        while self._reached < min(points, count):
            rows = self.stream.first[self._reached : self._reached + _ROWS["cpu"]].to(self.images.device)
            found = self.extract(self.images[rows], like)
            if self.cached is None:
                self.cached = found.new_zeros(count, found.shape[1])
            self.cached[rows.to(self.cached.device)] = found
            self._reached += len(rows)
        assert self.cached is not None
        return self.cached

    def extract(self, images: Tensor, like: Tensor) -> Tensor:
        """Return h for any images, (count, p)."""
        extract = self._make_extractor(scaled(images[:1], like))
        parts = images.split(sized(_ROWS.get(like.device.type, 1024), images))
        return self._normalised(torch.cat([extract(scaled(part, like)) for part in parts]))

    def _make_extractor(self, example: Tensor) -> Features:
        if self._extractor is None:
            if self._callable[0] is not None:
                self._extractor = Features(self._callable[0], None)
            else:
                assert self._frozen[0] is not None
                try:
                    self._extractor = Features.from_network(self._frozen[0], example, self.layer)
                except RuntimeError as error:
                    raise StfsebError(
                        f"context images of shape {tuple(example.shape[1:])} do not fit the network "
                        f"({str(error).splitlines()[0]}): give images of the training images' shape"
                    ) from error
                self._frozen = (None,)
        return self._extractor.to(example)

    def _normalised(self, features: Tensor) -> Tensor:
        if not self.normalise:
            return features
        return features / features.square().sum(1).mean().sqrt().clamp_min(torch.finfo(features.dtype).tiny)
