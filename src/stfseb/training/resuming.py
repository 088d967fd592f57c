"""What a run must keep to go on as if nothing had happened, when it is written, and how it is taken up again.

A run is a function of its identity (method, settings, protocol, data, initial weights) and of the state that is
kept here; the order of the data and the seeds of an epoch follow from the run's seed.
"""

from __future__ import annotations

import json
import logging
import math
import time
from dataclasses import MISSING, asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from stfseb.data.images import fingerprint
from stfseb.errors import StfsebError
from stfseb.methods.registry import KEYS, method_class
from stfseb.networks.registry import own_file, spec_of
from stfseb.training import checkpoint, randomness
from stfseb.training.batches import Batches, HostBatches, LoaderBatches, ResidentBatches
from stfseb.training.engine import EagerEngine
from stfseb.training.folds import contexts

if TYPE_CHECKING:
    from pathlib import Path

    from stfseb.methods.base import Method
    from stfseb.training.loop import Protocol, Training

log = logging.getLogger("stfseb")

_SHARE = 0.02  # of the time that checkpoints may take when nobody has said how often to write them
_CLOSE = 1e-4  # relative: initial weights are the same numbers on machines that round differently
_fingerprints = WeakTensorKeyDictionary()  # of data that many runs share


@dataclass
class Partial:
    """An epoch that was left in the middle: steps made, sums so far, random sources at its start and now."""

    steps: int
    sums: Tensor
    start: dict[str, Tensor]
    now: dict[str, Tensor]
    seconds: float


class Keeper:
    """A run's checkpoint: refuses another run's, restores, and is offered the run after every step and epoch.

    Args:
        path: the file.
        every: seconds between checkpoints (in the middle of an epoch too, where its steps run one by one);
            None: after every epoch, or after as many as keep the cost below a fiftieth of the time.
        identity: what the run is; see `identity_of`.
    """

    def __init__(self, path: Path, every: float | None, identity: dict[str, Any]) -> None:
        if every is not None and not every >= 0:
            raise StfsebError(f"checkpoint_every={every}: give a number of seconds, or None for every epoch")
        self.path, self.every, self.identity = path, every, identity
        self.found = checkpoint.read(path)
        if self.found is not None:
            try:
                theirs = self.found[1]["identity"]
            except KeyError as error:
                raise StfsebError(f"checkpoint {path} names no run: remove it to start over") from error
            if difference := _difference(_complete(theirs), identity):
                raise StfsebError(
                    f"checkpoint {path} is of another run ({difference}): give another file, or remove it to start over"
                )
        checkpoint.make_ready(path)
        self.kept = "" if self.found is None else _position(self.found[1])
        self.written, self.cost = time.perf_counter(), 0.0
        self.failing = False

    @property
    def due(self) -> bool:
        """Tell whether `every` seconds have passed."""
        return self.every is not None and time.perf_counter() - self.written >= self.every

    def after_epoch(self, training: Training) -> None:
        """Write the run down if it is time; one that has ended is always written."""
        spared = time.perf_counter() - self.written >= self.cost / _SHARE
        if training.done or (spared if self.every is None else self.due):
            self.offer(training)

    def offer(self, training: Training) -> None:
        """Write the run down; where that fails say so once, keep the checkpoint before, and let training go on."""
        try:
            self.save(training)
        except StfsebError as error:
            if not self.failing:
                left = f"the one {self.kept} stays" if self.kept else "there is none yet"
                log.warning("no checkpoint: %s; %s, training goes on", error, left)
            self.failing = True
            self.written = time.perf_counter()

    def save(self, training: Training) -> bool:
        """Write the run down, unless it has diverged; raise a one-line error if that cannot be done."""
        began = time.perf_counter()
        if not all(bool(torch.isfinite(p).all()) for p in training.method.parameters() if p.is_floating_point()):
            return False  # which the next step will say: the last good one stays
        tensors, state = snapshot(training)
        checkpoint.write(self.path, tensors, {**state, "identity": self.identity})
        self.written = time.perf_counter()
        self.cost = self.written - began
        self.kept, self.failing = _position(state), False
        return True

    def restore(self, training: Training) -> None:
        """Take the run up where the checkpoint has it, if there is one."""
        if self.found is None:
            return
        try:
            restore(training, *self.found)
        except StfsebError:
            raise
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            why = " ".join(str(error).split())[:200]
            raise StfsebError(f"checkpoint {self.path} cannot be used ({why}): remove it to start over") from error
        self.found = None
        log.info("%s resumed %s from %s", training.method.label, resumed_at(training), self.path)

    def stays(self) -> str:
        """Return a half-sentence on the checkpoint that there is, or nothing."""
        return f"; the checkpoint {self.path} {self.kept} stays" if self.kept else ""


def resumed_at(training: Training) -> str:
    """Return where a run goes on: "at epoch 3", "at epoch 3, step 17" or "when it was complete"."""
    if training.done:
        return "when it was complete"
    step = "" if training.partial is None else f", step {training.partial.steps + 1}"
    return f"at epoch {training.completed + 1}{step}"


# The state -------------------------------------------------------------------------------------------


def snapshot(training: Training) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return everything that changes in training: tensors, and the rest as JSON knows it."""
    method, engine, result = training.method, training.engine, training.result
    steps = engine.made if isinstance(engine, EagerEngine) and training.under_way else 0
    tensors = {f"model/{name}": value for name, value in _tensors(method.state_dict()).items()}
    best_is_now = steps == 0 and result.best_epoch == training.completed
    if not best_is_now:
        tensors |= {f"best/{name}": value for name, value in _tensors(training.best).items()}
    for index, parameter in enumerate(_trained(training)):
        for name, value in training.optimiser.state[parameter].items() if parameter in training.optimiser.state else ():
            tensors[f"optimiser/{index}/{name}"] = torch.as_tensor(value)
    device = method.like.device
    tensors |= {f"now/{name}": value for name, value in randomness.states(device, training.batches).items()}
    if steps:
        assert isinstance(engine, EagerEngine)
        tensors |= {f"start/{name}": value for name, value in training.sources.items()}
        tensors["sums"] = engine.sums
    state = {
        "epoch": training.completed,
        "steps": steps,
        "result": asdict(result),
        "best_is_now": best_is_now,
        "contexts": [context.step for context in contexts(method)],
        "rows": engine.folds.rows if isinstance(engine, EagerEngine) else None,
        "shared_prefix": [folded.share_prefix for folded in _folded(method)],
        "whole": [folded.whole for folded in _folded(method)],
        "provenance": method.provenance,
        "seconds": time.perf_counter() - training.started,
        "epoch_seconds": time.perf_counter() - training.begun if steps else 0.0,
    }
    return tensors, state


def restore(training: Training, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Undo `snapshot`, in place: captured steps hold the addresses of weights and optimiser states."""
    method, engine = training.method, training.engine
    method.load_state_dict(_filled(method, tensors, "model/"))
    training.best = _filled(method, tensors, "model/" if state["best_is_now"] else "best/")
    _restore_optimiser(training, tensors)
    training.result = type(training.result)(**state["result"])
    training.result.engine = engine.description
    for context, step in zip(contexts(method), state["contexts"], strict=True):
        context.step = step
        context.begin_parts(None)
    for k, (folded, shared) in enumerate(zip(_folded(method), state["shared_prefix"], strict=True)):
        folded.share_prefix = shared
        folded.whole = state["whole"][k] if "whole" in state else True  # as it was when checkpoints did not say
    if isinstance(engine, EagerEngine):
        engine.folds.rows = state["rows"]
    method.provenance.update(state["provenance"])
    training.started = time.perf_counter() - state["seconds"]
    device, now = method.like.device, _below(tensors, "now/")
    if not state["steps"]:
        randomness.put_back(now, device, training.batches)
        return
    if not isinstance(engine, EagerEngine):
        raise StfsebError(
            "the checkpoint was written in the middle of an epoch, which captured steps cannot take up: go on with "
            "capture=False, or on the device where the run was"
        )
    training.partial = Partial(state["steps"], tensors["sums"], _below(tensors, "start/"), now, state["epoch_seconds"])


@torch.no_grad()
def _restore_optimiser(training: Training, tensors: dict[str, Tensor]) -> None:
    optimiser, parameters = training.optimiser, _trained(training)
    saved: dict[int, dict[str, Tensor]] = {}
    for name, value in _below(tensors, "optimiser/").items():
        number, _, entry = name.partition("/")
        index = int(number)
        # Laid out as the parameter is: fused optimisers go through both memories side by side.
        laid = torch.empty_like(parameters[index]).copy_(value) if value.shape == parameters[index].shape else value
        saved.setdefault(index, {})[entry] = laid
    if not optimiser.state:
        optimiser.load_state_dict({**optimiser.state_dict(), "state": saved})
        return
    for index, parameter in enumerate(parameters):
        for entry, value in optimiser.state[parameter].items():
            value.copy_(saved[index][entry]) if index in saved else value.zero_()


def _trained(training: Training) -> list[Tensor]:
    return [p for group in training.optimiser.param_groups for p in group["params"]]


def _filled(method: Method, tensors: dict[str, Tensor], prefix: str) -> Any:
    filled = method.state_dict()  # with the versions that modules of a user may look at
    for name in filled:
        filled[name] = tensors[prefix + name]
    return filled


def _below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise StfsebError(
                f"'{name}' of the network's state is a {type(value).__name__}: a checkpoint holds tensors only"
            )
    return state


def _folded(method: Method) -> list[Any]:
    found = (getattr(module, "folded", None) for module in method.modules())
    return [folded for folded in found if hasattr(folded, "share_prefix")]


def _position(state: dict[str, Any]) -> str:
    return f"of epoch {state['epoch'] + 1}, step {state['steps']}," if state["steps"] else f"of epoch {state['epoch']}"


# The identity ----------------------------------------------------------------------------------------


def identity_of(method: Method, batches: Batches, held_out: Batches, protocol: Protocol) -> dict[str, Any]:
    """Return what defines a run, as JSON knows it; compute it before training changes a weight."""
    how = asdict(protocol)
    for name in ("capture", "compiled"):  # how steps are run, not which
        del how[name]
    described = {
        "method": method.key,
        "settings": method.settings.as_dict(),
        "likelihood": method.likelihood.spec(),
        "protocol": how,
        "batch_size": batches.batch_size,
        "augment": _name(getattr(batches, "augment", None)),
        "train": _described(batches),
        "validation": _described(held_out),
        "context": ["train" if c.originals is None else _fingerprint(c.originals) for c in contexts(method)],
        "network": [f"{name} {tuple(v.shape)}" for name, v in _tensors(method.state_dict()).items()],
        "initial weights": [_outline(v) for v in [*method.state_dict().values(), *_extractors(method)]],
    }
    if spec := own_file(spec_of(method.net) or {}):  # equal shapes do not make equal networks
        described["network file"] = f"{spec['file']} (sha256 {spec['sha256'][:16]})"
        described["network's"] = {"make": spec["make"], **spec["arguments"]}
    plain: dict[str, Any] = json.loads(json.dumps(described, default=str))
    return plain


def _described(batches: Batches) -> str:
    batches = batches.held if isinstance(batches, HostBatches) else batches
    if isinstance(batches, ResidentBatches):
        return f"{_fingerprint(batches.x)}-{_fingerprint(batches.y)}"
    kind = type(batches.loader.dataset).__name__ if isinstance(batches, LoaderBatches) else type(batches).__name__
    return f"{batches.num_data} examples of {kind}"


def _fingerprint(data: Tensor) -> str:
    version, known = _fingerprints.get(data, (None, ""))
    if version != data._version:
        known = fingerprint(data.float() if data.dtype == torch.bfloat16 else data)  # which numpy does not know
        _fingerprints[data] = (data._version, known)
    return str(known)


def _outline(value: Tensor) -> list[float]:
    """Return the sum and the norm: enough to tell initial weights of two seeds apart, whatever the rounding."""
    flat = value.detach().double().flatten()
    found = [float(flat.sum()), float(flat.norm())]
    return found if all(map(math.isfinite, found)) else []


def _extractors(method: Method) -> list[Tensor]:
    """Return the weights of frozen feature extractors, which follow from the network as it was constructed."""
    found: list[Tensor] = []
    for context in contexts(method):
        made = context._extractor
        source = (made.source if made is not None else None) or context._frozen[0] or context._callable[0]
        if isinstance(source, nn.Module):
            found += _tensors(source.state_dict()).values()
    return found


def _name(function: Any) -> str:
    return "" if function is None else str(getattr(function, "__qualname__", type(function).__name__))


def _complete(identity: dict[str, Any]) -> dict[str, Any]:
    """Give an identity of an earlier version the settings that it does not know yet, at their defaults."""
    settings = identity.get("settings")
    if not isinstance(settings, dict) or identity.get("method") not in KEYS:
        return identity
    known = fields(method_class(identity["method"]).settings_type)  # type: ignore[arg-type]
    defaults = {f.name: f.default for f in known if f.default is not MISSING and f.name not in settings}
    return {**identity, "settings": {**settings, **json.loads(json.dumps(defaults, default=str))}}


def _difference(theirs: Any, ours: Any, path: str = "") -> str:
    """Return the first difference between two identities in words, or nothing."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for name in dict.fromkeys([*theirs, *ours]):
            if found := _difference(theirs.get(name), ours.get(name), f"{path} {name}".strip()):
                return found
        return ""
    if path == "initial weights":
        if _same_weights(theirs, ours):
            return ""
        return "its network started from other weights: call torch.manual_seed before building the network"
    if theirs == ours:
        return ""
    return f"{path} is {_short(theirs)} there and {_short(ours)} here"


def _same_weights(theirs: Any, ours: Any) -> bool:
    if len(theirs) != len(ours):
        return False
    for a, b in zip(theirs, ours, strict=True):
        if len(a) != len(b) or (a and any(abs(p - q) > _CLOSE * max(a[1], 1e-30) for p, q in zip(a, b, strict=True))):
            return False
    return True


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
