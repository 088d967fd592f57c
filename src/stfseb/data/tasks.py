"""Tasks as data: what is trained on, what serves as context, what is unfamiliar, and how methods are set.

`load_task("mini")` finds a built-in task in `tasks.yaml`; `load_task("my_task.yaml")` reads a user's own, which
has the same keys, defaults and rights. `Task.load()` then brings the images.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stfseb.errors import StfsebError

if TYPE_CHECKING:
    from stfseb.data.images import ImageSet
    from stfseb.data.network_entry import NetworkFile
    from stfseb.data.sources import Shape, Source


@dataclass(frozen=True)
class HeldOut:
    """A validation split taken from the training images, always the same ones."""

    fraction: float
    seed: int = 0


@dataclass(frozen=True)
class Corruption:
    """The suite that corrupts the test images, and the severities that are reported (none: the suite's own)."""

    suite: str
    severities: tuple[int, ...] = ()


@dataclass(frozen=True)
class Shifts:
    """How the test images are changed: rotation angles in degrees, and corruptions."""

    rotation: tuple[float, ...] = ()
    corruption: Corruption | None = None


@dataclass(frozen=True)
class Task:
    """One experiment's data, network and settings, without any image."""

    name: str
    title: str
    train: Source
    validation: Source | HeldOut
    test: Source
    context: Source | None  # None: the training images themselves
    ood: dict[str, Source]
    shifts: Shifts
    network: str | NetworkFile  # "small", "deep", or a file of the user's own
    in_channels: int
    image_size: int
    class_names: tuple[str, ...]
    dropout: float | None  # None: a network of the user's own keeps its default
    augment: bool
    presets: dict[str, dict[str, Any]]
    training: dict[str, Any]
    network_settings: dict[str, Any] = field(default_factory=dict)
    ablated: dict[str, dict[str, Any]] = field(default_factory=dict)  # where ablations do not start from the preset

    def start(self, method: str) -> dict[str, Any]:
        """Return the settings of which ablations change one at a time: the preset, unless `ablated` has others."""
        return {**self.presets.get(method, {}), **self.ablated.get(method, {})}

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    @property
    def shape(self) -> Shape:
        """What the network takes."""
        from stfseb.data.sources import Shape

        return Shape(self.in_channels, self.image_size, self.class_names)

    def load(self, folder: str | Path | None = None, context: str | None = None) -> TaskData:
        """Read the images. `context` overrides the task's: "train", "distorted" or a registered set."""
        from stfseb.data.loading import load

        return load(self, folder, context)


@dataclass(frozen=True)
class TaskData:
    """A task with its images; `notes` says what a reader of the results must know about them."""

    task: Task
    train: ImageSet
    validation: ImageSet
    test: ImageSet
    context: ImageSet | None  # None: the training images themselves
    ood: dict[str, ImageSet]
    notes: list[str]
    folder: Path

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes: the data's own where the task has numbers only."""
        own = self.train.classes
        return own if len(own) == self.task.classes else self.task.class_names

    def fingerprints(self) -> dict[str, str]:
        """Identify the exact images behind every role, for the record of a result."""
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        if self.context is not None:
            parts["context"] = self.context
        parts |= {f"ood/{name}": part for name, part in self.ood.items()}
        return {role: part.fingerprint for role, part in parts.items()}

    def corrupted(self, types: tuple[str, ...] | None = None) -> dict[tuple[str, int], ImageSet]:
        """Return the corrupted test images by (type, severity): published where on disk, else generated."""
        suite = self.task.shifts.corruption
        if suite is None:
            return {}
        from stfseb.data import corruptions
        from stfseb.data.folder import cache_folder

        return corruptions.load(
            suite.suite,
            clean=self.test,
            folder=self.folder,
            severities=suite.severities or None,
            types=types,
            cache=cache_folder(self.folder),
        )


def task_names() -> tuple[str, ...]:
    """Return the names of the built-in tasks."""
    from stfseb.data.task_files import built_in

    return tuple(built_in()["tasks"])


def load_task(name_or_path: str | Path) -> Task:
    """Return a built-in task by name, or a user's own from a YAML file."""
    from stfseb.data import task_files

    text = str(name_or_path)
    try:
        path = Path(text).expanduser()
        folder = path.is_dir()
    except (OSError, RuntimeError):  # too long a name, or nobody's home
        raise task_files.unknown_task(text, task_files.built_in()["tasks"]) from None
    if folder and (_is_file(text) or text not in task_files.built_in()["tasks"]):
        raise StfsebError(
            f"task '{text}' is a folder: give a YAML file that names it (train: {{folder: {text}}}, test, ...)"
        )
    if _is_file(text):
        if not path.exists():
            names = ", ".join(task_names())
            raise StfsebError(f"task file '{text}' does not exist: give the path of one, or a name ({names})")
        return task_files.read_task_file(path)
    tasks = task_files.built_in()["tasks"]
    if text not in tasks:
        raise task_files.unknown_task(text, tasks)
    return task_files.parse_task(text, tasks[text], Path.cwd(), "tasks.yaml")


def definition_of(name_or_path: str | Path) -> str:
    """Return the fingerprint of a user's task file, nothing for a built-in task."""
    from stfseb.data import task_files

    text = str(name_or_path)
    return task_files.definition(Path(text).expanduser()) if _is_file(text) else ""


def _is_file(text: str) -> bool:
    return text.endswith((".yaml", ".yml")) or "/" in text or "\\" in text


def with_settings(task: Task, **changes: Any) -> Task:
    """Return the task with some fields changed (`training` and `presets` are merged, not replaced)."""
    for key in ("training", "presets"):
        if key in changes:
            changes[key] = merged(getattr(task, key), changes[key])
    if strange := set(changes) - set(Task.__dataclass_fields__):
        raise StfsebError(f"a task has no field '{min(strange)}'")
    return replace(task, **changes)


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with `over` laid upon it, mapping by mapping."""
    result = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result
