"""Saved models: a folder with weights (safetensors) and everything else (JSON). Never pickle.

`model.json` names the weights file; it is replaced last and atomically, so that at every moment the
folder holds one complete model. Weights are stored without a device.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as serialise
from torch.nn.parameter import is_lazy

from stfseb._version import __version__
from stfseb.data.images import fingerprint
from stfseb.errors import StfsebError
from stfseb.files import alone_in, read_json, write_bytes, write_json
from stfseb.likelihoods import from_spec
from stfseb.methods.calibrated import still_valid
from stfseb.methods.dropout_rates import check_rates, dropout_rates, restore_rates
from stfseb.methods.registry import KEYS, method_class
from stfseb.networks.checks import check_module
from stfseb.networks.registry import build, own_file, spec_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stfseb.methods.base import Method

FORMAT = 1


def save(method: Method, path: str | Path) -> Path:
    """Write `method` into the folder `path` (weights, settings, calibration; not the context's images)."""
    folder = Path(path).expanduser()
    if folder.is_file():
        raise StfsebError(f"{folder} is a file: give the name of a folder")
    _check_known(method)
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in method.state_dict().items()}
    content = serialise(tensors)
    digest = hashlib.sha256(content).hexdigest()
    name = f"weights-{digest[:12]}.safetensors"
    description = {**_description(method), "weights": {"file": name, "sha256": digest}}
    json.dumps(description, allow_nan=False)  # what cannot be written must fail before anything is
    with alone_in(folder):
        write_bytes(folder / name, content)
        write_json(folder / "model.json", description)
        for stale in folder.glob("weights-*.safetensors"):
            if stale.name != name:
                stale.unlink(missing_ok=True)
    return folder


def load(path: str | Path, net: nn.Module | None = None) -> Method:
    """Read a model that `save` wrote, on the CPU; `.to(device)` moves it.

    Built-in networks are rebuilt; for any other module give a fresh instance as `net`.
    """
    folder, meta = Path(path).expanduser(), described(path)
    if net is not None:
        check_module(net)
    method: Method | None = None
    tensors: dict[str, Tensor] = {}
    try:
        tensors = _read_weights(folder, meta)
        method = _rebuild(meta, net, tensors)
        method.load_state_dict(tensors)
        if net is None:
            restore_rates(method, meta)
        check_rates(method, meta)
    except KeyError as error:
        raise StfsebError(f"{folder / 'model.json'} lacks the entry {error}: it is damaged") from error
    except StfsebError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise StfsebError(
            f"{folder / 'model.json'} cannot be used ({type(error).__name__}: {' '.join(str(error).split())[:200]}): "
            "it is damaged or was edited"
        ) from error
    except RuntimeError as error:
        said = (_misfits(method, tensors) if method is not None else "") or " ".join(str(error).split())
        name = "the network" if net is None else type(net).__name__
        raise StfsebError(f"the weights in {folder} do not fit {name}: {said}") from error
    method.eval()
    return method


def _misfits(method: Method, tensors: dict[str, Tensor]) -> str:
    """Say which tensors of a model differ from those of the network it was to be loaded into: the first three."""
    own = {name: value for name, value in method.state_dict().items() if not is_lazy(value)}
    said = [
        f"{name} is {tuple(tensors[name].shape)} in the model and {tuple(own[name].shape)} in the network"
        for name in own.keys() & tensors.keys()
        if own[name].shape != tensors[name].shape
    ]
    said += [f"the network has no {name}" for name in tensors.keys() - method.state_dict().keys()]
    said += [f"the model has no {name}" for name in own.keys() - tensors.keys()]
    more = f", and {len(said) - 3} more" if len(said) > 3 else ""
    return f"{', '.join(sorted(said)[:3])}{more}: give the network that was saved" if said else ""


def described(path: str | Path) -> dict[str, Any]:
    """Return what a model folder says about its model, without its weights."""
    folder = Path(path).expanduser()
    _check_there(folder)
    meta = read_json(folder / "model.json", "model file")
    if not isinstance(meta, dict) or not isinstance(meta.get("format"), int):
        raise StfsebError(f"{folder / 'model.json'} is not a model description: it names no format")
    if meta["format"] > FORMAT:
        raise StfsebError(
            f"{folder} has format {meta['format']} and this is stfseb {__version__}, which reads up to {FORMAT}: "
            "upgrade stfseb"
        )
    return meta


def _check_there(folder: Path) -> None:
    """Raise an error that leads to the model unless `folder` holds one."""
    remedy = "give the folder that 'stfseb train', 'stfseb compare' or stfseb.save wrote"
    if not (folder / "model.json").exists():
        _check_finished(folder)
    if not folder.exists():
        raise StfsebError(f"model folder {folder} does not exist: {remedy}")
    if not folder.is_dir():
        raise StfsebError(f"{folder} is a file, not a model folder: {remedy}")
    if not (folder / "model.json").exists():
        inside = sorted(path.parent for path in [*folder.glob("*/model.json"), *folder.glob("*/*/model.json")])
        if inside:
            others = f" or one of {len(inside) - 1} more" if len(inside) > 1 else ""
            raise StfsebError(f"{folder} holds runs, not a model: give {inside[0]}{others}")
        raise StfsebError(f"{folder} holds no model (model.json is missing): {remedy}")


def _check_finished(folder: Path) -> None:
    """Raise if a folder without a model is (or is in) the folder of a run that has not finished."""
    for run in (folder, folder.parent):
        if (run / "record.json").exists():
            continue
        if (run / "run.json").exists():
            raise StfsebError(
                f"the run in {run} is unfinished and has no model yet: go on with it, "
                f"'stfseb train --resume {shlex.quote(str(run))}'"
            )
        if (run / "checkpoint").is_file():
            raise StfsebError(
                f"the run in {run} is unfinished and has no model yet: start the command that began it again "
                f"(compare with --resume {shlex.quote(str(run.parent))})"
            )


def _check_known(method: Method) -> None:
    """Raise for a method whose key `load` would not find."""
    if method.key not in KEYS:
        name = type(method).__name__
        raise StfsebError(f"{name} has the key '{method.key}', which load does not know: give it its parent's")


def _description(method: Method) -> dict[str, Any]:
    spec = spec_of(method.net)
    context = getattr(method, "context", None)
    images = getattr(context, "originals", None)
    return {
        "format": FORMAT,
        "stfseb": __version__,
        "method": method.key,
        "settings": method.settings.as_dict(),
        "likelihood": method.likelihood.spec(),
        "network": spec or {"class": type(method.net).__qualname__},
        "dtype": str(method.like.dtype).removeprefix("torch."),
        "frozen": [name for name, parameter in method.named_parameters() if not parameter.requires_grad],
        "dropout": dropout_rates(method),
        "outputs": method._outputs,
        "range": None if method.seen.span is None else list(method.seen.span),
        "context": method.provenance.get("context")
        if images is None
        else {"count": len(images), "fingerprint": fingerprint(images)},
        "calibration": method.calibration,
        "provenance": method.provenance,
    }


def _rebuild(meta: dict[str, Any], net: nn.Module | None, tensors: dict[str, Tensor]) -> Method:
    """Return the method as it was saved, but for the values of its tensors."""
    import torch

    own = net
    if net is None:
        if "network" not in meta["network"] and not own_file(meta["network"]):
            raise StfsebError(
                f"the model's network is {meta['network'].get('class')}, which is not built in: "
                "in Python give a fresh instance, load(path, net=...), see docs/own-network.md"
            )
        net = build(meta["network"])
    kinds = {value.dtype for name, value in tensors.items() if name.startswith("net.") and value.is_floating_point()}
    dtype = getattr(torch, meta["dtype"])
    if len(kinds) <= 1:  # buffers that are not saved as well; of a network that mixes types they are as it made them
        net = net.to(dtype)
    scaled = _scaled(meta, tensors)
    _ask_for_gradients(net, scaled)
    method = _restored(meta, net, own)
    _cast(method, tensors)
    _freeze(method, meta.get("frozen"), tuple(scaled))
    method.calibration, method.provenance = still_valid(meta["calibration"]), dict(meta["provenance"])
    if meta.get("context") is not None:  # so that saving the model again keeps it
        method.provenance["context"] = meta["context"]
    method._outputs = meta["outputs"]
    if meta.get("range") is not None:  # models of before have none
        low, high = meta["range"]
        method.seen.learn((float(low), float(high)))
    return method


def _restored(meta: dict[str, Any], net: nn.Module, own: nn.Module | None) -> Method:
    """Return the method around `net`; what a user's `own` network lacks is said to be another network's."""
    cls = method_class(meta["method"])
    settings, likelihood = cls.settings_type.from_dict(meta["settings"]), from_spec(meta["likelihood"])
    try:
        return cls.restore(net, settings, likelihood)
    except StfsebError as error:
        if own is None or meta["method"] == "ensemble":
            raise
        name, why = type(own).__name__, str(error).partition(": ")[0]
        raise StfsebError(
            f"{name} is not the network that was saved ({why}): give a fresh instance of that one, load(path, net=...)"
        ) from error


def _scaled(meta: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, set[str]]:
    """Return which parameters of its network have scales, for each mean-field method by the prefix of its names."""
    pattern = r"(net\.\d+\.)raw_scales\.(.+)" if meta["method"] == "ensemble" else r"()raw_scales\.(.+)"
    found: dict[str, set[str]] = {}
    for match in filter(None, (re.fullmatch(pattern, name) for name in tensors)):
        found.setdefault(match[1], set()).add(match[2].replace("/", "."))
    return found


def _ask_for_gradients(net: nn.Module, scaled: dict[str, set[str]]) -> None:
    """Let the parameters with scales, and no others, require gradients: mean-field methods are made for these."""
    for prefix, names in scaled.items():
        place = prefix.removeprefix("net.")  # the networks of an ensemble's members, as `load` is given them
        inside = {n.removeprefix(place): p for n, p in net.named_parameters() if n.startswith(place)}
        if names <= inside.keys():  # else it is another network, which the weights will not fit
            for name, parameter in inside.items():
                parameter.requires_grad_(name in names)


def _freeze(method: Method, frozen: list[str] | None, settled: tuple[str, ...]) -> None:
    """Let the parameters require gradients as the saved ones did; those of mean-field methods are settled."""
    if frozen is None:  # models of before do not say
        return
    for name, parameter in method.named_parameters():
        if not name.startswith(settled) and parameter.is_floating_point():
            parameter.requires_grad_(name not in frozen)


def _cast(method: Method, tensors: dict[str, Tensor]) -> None:
    """Give every parameter and buffer the precision of its stored tensor: a network may mix several."""
    for name, value in chain(method.named_parameters(remove_duplicate=False), method.named_buffers()):
        stored = tensors.get(name, value)
        if stored.dtype != value.dtype and stored.is_floating_point() and value.is_floating_point():
            value.data = value.data.to(stored.dtype)


def _read_weights(folder: Path, meta: dict[str, Any]) -> dict[str, Any]:
    file = folder / str(meta["weights"]["file"])
    if file.parent != folder or not file.is_file():
        raise StfsebError(f"weights file {file} is missing: copy the whole model folder")
    if hashlib.sha256(file.read_bytes()).hexdigest() != meta["weights"]["sha256"]:
        raise StfsebError(
            f"weights file {file} is damaged or truncated (its checksum is not model.json's): copy the folder again"
        )
    try:
        return load_file(file)
    except SafetensorError as error:
        raise StfsebError(f"weights file {file} cannot be read: {error}") from error
