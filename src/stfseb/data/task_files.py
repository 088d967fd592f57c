"""Reading tasks from YAML, with errors that name the file, the key and the remedy."""

from __future__ import annotations

import hashlib
import json
import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from stfseb.data import network_entry, pictures, sets, sources
from stfseb.data.tasks import Corruption, HeldOut, Shifts, Task, merged
from stfseb.errors import StfsebError, unknown

KEYS = (
    "name", "title", "train", "validation", "test", "context", "ood", "shifts", "network", "channels",
    "image_size", "classes", "dropout", "augment", "presets", "training", "ablated",
)  # fmt: skip
METHODS = ("stfseb", "fseb", "gfsvi", "mcdropout", "mfvi", "map")


@cache
def built_in() -> dict[str, Any]:
    """Return the contents of `tasks.yaml`."""
    import yaml

    text = resources.files("stfseb.data").joinpath("tasks.yaml").read_text(encoding="utf-8")
    content: dict[str, Any] = yaml.safe_load(text)
    return content


def unknown_task(name: str, known: Any) -> StfsebError:
    """Return the error for an unknown task, which also says how to give one's own."""
    return StfsebError(f"{unknown('task', name, known)}; or give a file, my_task.yaml")


def read_task_file(path: Path) -> Task:
    """Read a user's own task."""
    content = _content(path)
    name = str(content.get("name", path.stem))
    if not re.fullmatch(r"[\w][\w.-]*", name):
        raise StfsebError(f"{path.name}: name '{name}' goes into file names: use letters, digits, '.', '_' and '-'")
    return parse_task(name, content, path.parent.resolve(), path.name)


def definition(path: Path) -> str:
    """Return a fingerprint of what a task file says about data and network, wherever it lies.

    Its name, title, presets and training are left out: runs hold their settings themselves.
    """
    kept = {k: v for k, v in _content(path).items() if k not in ("name", "title", "presets", "training", "ablated")}
    if "network" in kept:
        kept["network"] = network_entry.with_fingerprint(kept["network"], path.parent.resolve())
        if isinstance(kept["network"], dict) and "file" in kept["network"]:
            kept.setdefault("dropout", None)  # the network's own default: with 0.5, as it was once, it is another run
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _content(path: Path) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StfsebError(f"task file '{path}' does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise StfsebError(f"task file '{path}' cannot be read ({error})") from None
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" in line {where.line + 1}" if where else ""
        raise StfsebError(f"task file '{path}' is not YAML{line}: {getattr(error, 'problem', error)}") from None
    if not isinstance(content, dict):
        raise StfsebError(f"task file '{path}' must hold keys such as train, test and classes, not {content!r:.60}")
    found: dict[str, Any] = _numbers(content)
    return found


def _numbers(value: Any) -> Any:
    """Read 1e-3 as a number everywhere, which YAML 1.1 takes for a word."""
    if isinstance(value, dict):
        return {key: _numbers(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_numbers(entry) for entry in value]
    scientific = isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value)
    return float(value) if scientific else value


def parse_task(name: str, content: dict[str, Any], base: Path, file: str) -> Task:
    """Turn one entry into a `Task`; the defaults of `tasks.yaml` fill what it leaves out."""
    try:
        return _parse(name, content, base)
    except StfsebError as error:
        raise StfsebError(f"{file}: {error}") from None


def _parse(name: str, content: dict[str, Any], base: Path) -> Task:
    _known(content, KEYS, "key")
    for key in ("train", "test", "channels", "image_size"):
        if key not in content:
            raise StfsebError(f"'{key}' is missing")
    entry = merged(
        {k: v for k, v in built_in()["defaults"].items() if k not in ("validation", "context", "network")}, content
    )
    defaults = built_in()["defaults"]
    train = sources.parse(entry["train"], "train", base)
    validation = entry.get("validation", defaults["validation"])
    own = entry.get("context", defaults["context"])
    context = sources.own_context(own) if own in sources.OWN_CONTEXTS else sources.parse(own, "context", base)
    ood = _mapping(entry.get("ood", {}), "ood")
    network, settings = network_entry.parse(entry.get("network", defaults["network"]), defaults["network"], base)
    own_rate = not isinstance(network, str) and "dropout" not in content
    presets, ablated = _by_method(entry["presets"], "presets"), _by_method(entry.get("ablated", {}), "ablated")
    training = _mapping(entry["training"], "training")
    _known(training, defaults["training"], "key in training")
    return Task(
        name=name,
        title=str(entry.get("title", name)),
        train=train,
        validation=_held_out(validation) or sources.parse(validation, "validation", base),
        test=sources.parse(entry["test"], "test", base),
        context=context,
        ood={str(key): sources.parse(value, "ood", base) for key, value in ood.items()},
        shifts=_shifts(_mapping(entry["shifts"], "shifts")),
        network=network,
        in_channels=_number(entry["channels"], "channels", int, 1, 3),
        image_size=_number(entry["image_size"], "image_size", int, 4, 4096),
        class_names=_classes(entry.get("classes"), train),
        dropout=None if own_rate else _number(entry["dropout"], "dropout", float, 0, 0.999),
        augment=_flag(entry["augment"], "augment"),
        presets=presets,
        training=_training(training),
        network_settings=settings,
        ablated=ablated,
    )


def _by_method(value: Any, key: str) -> dict[str, dict[str, Any]]:
    """Return settings by method."""
    _known(_mapping(value, key), METHODS, f"method in {key}")
    return {method: dict(_mapping(settings, f"{key}: {method}")) for method, settings in value.items()}


def _known(given: dict[str, Any], known: Any, kind: str) -> None:
    for key in given:
        if key not in known:
            raise unknown(kind, str(key), known)


def _mapping(value: Any, key: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise StfsebError(f"{key}: {value!r} must be a mapping, 'name: value'")
    return value


def _number(value: Any, key: str, kind: type, low: float, high: float) -> Any:
    good = isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not good or not low <= value <= high:
        what = "a whole number" if kind is int else "a number"
        raise StfsebError(f"{key}: {value!r} must be {what} from {low} to {high}")
    return kind(value)


def _flag(value: Any, key: str) -> bool:
    if not isinstance(value, bool):
        raise StfsebError(f"{key}: {value!r} must be true or false")
    return value


def _held_out(value: Any) -> HeldOut | None:
    if not isinstance(value, dict) or "fraction" not in value:
        return None
    _known(value, ("fraction", "seed"), "key in validation")
    fraction = _number(value["fraction"], "validation: fraction", float, 0.001, 0.9)
    return HeldOut(fraction, _number(value.get("seed", 0), "validation: seed", int, 0, 2**31))


def _classes(value: Any, train: sources.Source) -> tuple[str, ...]:
    if value is None:
        if train.kind == "folder":
            names = pictures.class_names(Path(train.where))
            if len(names) == 1:
                raise StfsebError(
                    f"train: {train.where!r} has one class folder, {names[0]!r}: give two classes or more"
                )
            return names
        raise StfsebError("'classes' is missing: give their number or names (only a folder of class folders tells)")
    if isinstance(value, list):
        if len(value) < 2 or len(set(map(str, value))) != len(value):
            raise StfsebError(f"classes: {value!r} must be two or more different names")
        return tuple(map(str, value))
    return tuple(map(str, range(_number(value, "classes", int, 2, 100_000))))


def _shifts(value: dict[str, Any]) -> Shifts:
    _known(value, ("rotation", "corruption"), "key in shifts")
    angles = value.get("rotation") or []
    if not isinstance(angles, list):
        raise StfsebError(f"shifts: rotation: {angles!r} must be a list of angles in degrees")
    rotation = tuple(_number(angle, "shifts: rotation", float, -360, 360) for angle in angles)
    corruption = value.get("corruption")
    if corruption is None:
        return Shifts(rotation)
    if isinstance(corruption, str):
        corruption = {"suite": corruption}
    _known(_mapping(corruption, "shifts: corruption"), ("suite", "severities"), "key in shifts: corruption")
    suites = [name for name, entry in sets.all_sets().items() if entry.types]
    if corruption.get("suite") not in suites:
        raise unknown("corruption suite", str(corruption.get("suite")), suites)
    severities = corruption.get("severities", [])
    if not isinstance(severities, list):
        raise StfsebError(f"shifts: severities: {severities!r} must be a list of numbers from 1 to 5")
    return Shifts(
        rotation,
        Corruption(corruption["suite"], tuple(_number(s, "shifts: severities", int, 1, 5) for s in severities)),
    )


def _training(value: dict[str, Any]) -> dict[str, Any]:
    whole = {key: _number(value[key], f"training: {key}", int, 1, 10**9) for key in value if key != "lr"}
    return whole | {"lr": _number(value["lr"], "training: lr", float, 1e-12, 1e3)}
