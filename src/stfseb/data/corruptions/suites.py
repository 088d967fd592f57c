"""What the two suites hold: their types, severities and the images they are made for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stfseb.errors import StfsebError, unknown

if TYPE_CHECKING:
    from collections.abc import Iterable

CIFAR10_C = (
    *("gaussian_noise", "shot_noise", "impulse_noise"),
    *("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    *("snow", "frost", "fog", "brightness"),
    *("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
)
CIFAR10_C_EXTRA = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
MNIST_C = (
    *("shot_noise", "impulse_noise", "glass_blur", "motion_blur", "shear", "scale", "rotate", "brightness"),
    *("translate", "stripe", "fog", "spatter", "dotted_line", "zigzag", "canny_edges"),
)


@dataclass(frozen=True)
class Suite:
    """A corruption suite: default types, those published beside them, severities and image shape."""

    name: str
    types: tuple[str, ...]
    extra: tuple[str, ...]
    severities: tuple[int, ...]
    shape: tuple[int, int, int]

    def choose(
        self, types: Iterable[str] | None, severities: Iterable[int] | None
    ) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Return the types and severities asked for, the defaults where none are, or say which is unknown."""
        kinds = self.types if types is None else tuple(types)
        levels = self.severities if severities is None else tuple(severities)
        for kind in kinds:
            if kind not in self.types + self.extra:
                raise unknown(f"{self.name} corruption", kind, self.types + self.extra)
        for level in levels:
            if level not in self.severities:
                known = ", ".join(map(str, self.severities))
                raise StfsebError(f"{self.name} has no severity {level}: choose from {known}")
        return kinds, levels


SUITES = {
    "cifar10-c": Suite("cifar10-c", CIFAR10_C, CIFAR10_C_EXTRA, (1, 2, 3, 4, 5), (3, 32, 32)),
    # One severity of each type was published; 0 stands for it.
    "mnist-c": Suite("mnist-c", MNIST_C, (), (0,), (1, 28, 28)),
}


def find(suite: str) -> Suite:
    """Return a suite by name."""
    if suite not in SUITES:
        raise unknown("corruption suite", suite, SUITES)
    return SUITES[suite]
