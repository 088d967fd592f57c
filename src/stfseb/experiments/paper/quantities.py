"""The numbers that tables show: how they are called, read from a record, and printed."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stfseb.data.tasks import Task

_PLAIN = {  # title, unit, higher is better, scale, digits
    "acc": ("Accuracy", "%", True, 100.0, 2),
    "ece": ("ECE", "", False, 1.0, 3),
    "nll": ("NLL", "", False, 1.0, 3),
    "brier": ("Brier", "", False, 1.0, 3),
    "temperature": ("Temperature", "", None, 1.0, 3),
    "seconds_per_epoch": ("An epoch", "s", False, 1.0, 2),
    "peak_memory_mb": ("Peak memory", "MB", False, 1.0, 0),
}
_TAILS = {"weights": "weights", "context": "outputs at context images", "test": "outputs at test images"}
SET_NAMES = {
    "mnist": "MNIST",
    "fmnist": "FMNIST",
    "notmnist": "notMNIST",
    "svhn": "SVHN",
    "bloodmnist": "BloodMNIST",
    "organsmnist": "OrganSMNIST",
    "mnist-c": "MNIST-C",
    "cifar10-c": "CIFAR-10-C",
}


@dataclass(frozen=True)
class Quantity:
    """A number of a run, under the key that the tables use ("acc", "auroc/svhn", "auroc/cifar10-c/5")."""

    key: str
    title: str
    unit: str
    higher: bool | None  # None: neither is better
    scale: float
    digits: int

    @property
    def heading(self) -> str:
        """The title, its unit unless that is percent, and an arrow towards the better."""
        unit = f", {self.unit}" if self.unit not in ("", "%") else ""
        arrow = {True: " ↑", False: " ↓", None: ""}[self.higher]
        return f"{self.title}{unit}{arrow}"

    def read(self, record: Mapping[str, Any]) -> float | None:
        """Return the number in its printed unit, None where the run does not have it."""
        value = record.get(self.key, record["metrics"].get(self.key))
        if value is None and self.key.startswith("auroc/"):
            value = corrupted_auroc(record, self.key.removeprefix("auroc/"))
        if value is None and self.key.startswith("tails/"):
            sets = ((record.get("parts") or {}).get("tails") or {}).get("sets", {})
            value = sets.get(self.key.removeprefix("tails/"), {}).get("inverse_dof")
        return None if value is None else self.scale * float(value)


def quantity(key: str) -> Quantity:
    """Return the quantity of a key."""
    if key.startswith("auroc/"):
        name, _, severity = key.removeprefix("auroc/").partition("/")
        shown = SET_NAMES.get(name, name)
        return Quantity(key, f"AUROC {shown}{f' {severity}' if severity else ''}", "%", True, 100.0, 2)
    if key.startswith("tails/"):
        return Quantity(key, f"1/dof, {_TAILS[key.removeprefix('tails/')]}", "", None, 1.0, 3)
    return Quantity(key, *_PLAIN[key])


def quantities(*keys: str) -> tuple[Quantity, ...]:
    """Return the quantities of these keys."""
    return tuple(map(quantity, keys))


def auroc_keys(task: Task) -> tuple[str, ...]:
    """Return the keys of a task's unfamiliar sets and of its corruptions, as the paper's second table has them."""
    keys = [f"auroc/{name}" for name in task.ood]
    suite = task.shifts.corruption
    if suite is not None:
        keys += [f"auroc/{suite.suite}/{s}" for s in suite.severities] or [f"auroc/{suite.suite}"]
    return tuple(keys)


def corrupted_auroc(record: Mapping[str, Any], name: str) -> float | None:
    """Return the mean over corruption types of AUROCs, at one severity for "SUITE/SEVERITY"; they are not pooled."""
    part = (record.get("parts") or {}).get("corruption") or {}
    suite, _, severity = name.partition("/")
    if not part or part.get("suite") != suite:
        return None
    found = [v["auroc"] for key, v in part["sets"].items() if not severity or key.rpartition("/")[2] == severity]
    return statistics.fmean(found) if found else None
