"""The Monte Carlo predictor as one file for other programs: `torch.export` programs and ONNX.

The graph takes rows x (B, ...), floating point as the network sees them (pixels in [0, 1]), for any B, and returns
`samples` (S, B, L), one prediction a sampled function, and `prediction` (B, L), their mean, which is
what `method.predict` returns. S is fixed.

Dropout never enters the graph as a dropout node: optimisers (onnxruntime's by default) take such a node for
training's and delete it without a word, and every sample becomes the same. The masks are constants in the graph
(`masks="inside"`, the S functions of one seed) or inputs of it (`masks="input"`); either way dropout is a product.
Methods with a posterior over weights carry S drawn sets of weights instead.
"""

from __future__ import annotations

import copy
import io
import json
import logging
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stfseb._version import __version__
from stfseb.errors import StfsebError, unknown
from stfseb.files import replacing
from stfseb.inputs import as_tensor, scaled
from stfseb.likelihoods import Classification, MultiLabel
from stfseb.methods.calibrated import PROBABILITIES, tempered
from stfseb.methods.ensemble import Ensemble
from stfseb.methods.map import MAP
from stfseb.methods.mc_dropout import DropoutMethod
from stfseb.methods.mean_field import MeanFieldMethod
from stfseb.methods.settings import check_count
from stfseb.networks.dropout import Block, NoDropout
from stfseb.networks.folding import FoldedNetwork, deterministic
from stfseb.networks.functional import call_with, places

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from stfseb.likelihoods import Likelihood
    from stfseb.methods.base import Method

MASKS = ("inside", "input")
VALUES = ("probabilities", "logits")
_ROWS = 4  # of the example: more than one, so that the number of rows stays a variable of the graph


class _Sampler(nn.Module):
    """S functions of a method: called with rows and masks, it gives outputs (S, rows, L)."""

    masks: tuple[Tensor, ...] = ()


class _Point(_Sampler):
    def __init__(self, net: nn.Module, samples: int) -> None:
        super().__init__()
        self.net, self.samples = net, samples

    def forward(self, x: Tensor, masks: tuple[Tensor, ...]) -> Tensor:
        del masks  # one set of weights
        return deterministic(self.net, x).unsqueeze(0).repeat(self.samples, 1, 1)


class _Masked(_Sampler):
    def __init__(self, net: nn.Module, samples: int, seed: int, x: Tensor) -> None:
        super().__init__()
        self.net, self.samples = net, samples
        self.folded = FoldedNetwork(net)
        self.folded.whole = True  # a graph of any number of rows asks nothing of them
        generator = torch.Generator(x.device).manual_seed(seed)
        self.folded(x, samples, [Block(len(x), shared=True, generator=generator)])
        generator.manual_seed(seed)
        plan = self.folded.plan
        self.masks = tuple(lanes.mask(lanes.draw(x.device, generator), x.dtype) for lanes in plan)

    def forward(self, x: Tensor, masks: tuple[Tensor, ...]) -> Tensor:
        self.folded.lanes = masks
        out, _ = self.folded(x, self.samples, [Block(x.shape[0], shared=True)])
        return out


class _Weighted(_Sampler):
    def __init__(self, method: MeanFieldMethod, samples: int, seed: int) -> None:
        super().__init__()
        self.net = method.net
        theta = method.draw_weights(samples, torch.Generator(method.like.device).manual_seed(seed)).detach()
        self.names = list(method.means())
        self.places = places(method.net)
        self.samples = samples
        for index, row in enumerate(theta):
            for name, value in method._named(row).items():
                self.register_buffer(f"{name.replace('.', '_')}_{index}", value.clone())

    def forward(self, x: Tensor, masks: tuple[Tensor, ...]) -> Tensor:
        del masks  # dropout is the identity
        rows = []
        for index in range(self.samples):
            weights = {name: getattr(self, f"{name.replace('.', '_')}_{index}") for name in self.names}
            with NoDropout():
                rows.append(call_with(self.net, weights, x, self.places))
        return torch.stack(rows)


class _Members(_Sampler):
    def __init__(self, samplers: list[_Sampler]) -> None:
        super().__init__()
        self.samplers = nn.ModuleList(samplers)
        self.counts = [len(sampler.masks) for sampler in samplers]
        self.masks = tuple(mask for sampler in samplers for mask in sampler.masks)

    def forward(self, x: Tensor, masks: tuple[Tensor, ...]) -> Tensor:
        outputs, start = [], 0
        for sampler, count in zip(self.samplers, self.counts, strict=True):
            outputs.append(sampler(x, masks[start : start + count]))
            start += count
        return torch.cat(outputs)


class PortablePredictor(nn.Module):
    """What is exported: a method's S functions and what its likelihood makes of their outputs."""

    def __init__(self, sampler: _Sampler, likelihood: Likelihood, temperature: float, values: str) -> None:
        super().__init__()
        self.sampler, self.likelihood = sampler, likelihood
        self.calibration = {PROBABILITIES: {"temperature": temperature}}
        self.values = values
        for index, mask in enumerate(sampler.masks):
            self.register_buffer(f"mask{index}", mask)
        self.count = len(sampler.masks)

    def forward(self, x: Tensor, *masks: Tensor) -> tuple[Tensor, Tensor]:
        """Return `samples` (S, B, L) and `prediction` (B, L); without masks, under those of the seed."""
        if not masks:
            masks = tuple(getattr(self, f"mask{index}") for index in range(self.count))
        outputs = self.sampler(x, masks)
        prediction = self.likelihood.predict(tempered(self.calibration, self.likelihood, outputs))
        if self.values == "logits":
            return outputs, prediction
        if isinstance(self.likelihood, Classification):
            single = self.likelihood.class_log_probs(outputs).exp()
        elif isinstance(self.likelihood, MultiLabel):
            single = torch.sigmoid(outputs)
        else:
            single = outputs  # regression: each function's own prediction
        return single, prediction


def predictor(
    method: Method, samples: int | None = None, *, seed: int = 0, example: Any = None, values: str = "probabilities"
) -> tuple[PortablePredictor, Tensor]:
    """Return the module that is exported, on the CPU, and the rows that it is traced with.

    Its samples are those of `method.sample_logits(x, samples, seed=seed)`.
    """
    samples = _count(method, samples)
    if values not in VALUES:
        raise unknown("values", values, VALUES)
    calibration = method.calibration.get(PROBABILITIES, {})
    if "maps" in calibration:
        raise StfsebError(
            "isotonic calibration is not exported: calibrate with method='temperature', or export before calibrating"
        )
    method = _portable(method)
    x = _example(method, example)
    with torch.no_grad():
        sampler = _sampler(method, samples, seed, x)
    module = PortablePredictor(sampler, method.likelihood, calibration.get("temperature", 1.0), values)
    return module.eval().requires_grad_(False), x


def masks_for(
    method: Method, samples: int | None = None, *, seed: int = 0, example: Any = None
) -> dict[str, NDArray[np.generic]]:
    """Return the masks of a seed by the names that the graph gives its inputs (`masks="input"`).

    With them the graph returns the functions of `method.sample_logits(x, samples, seed=seed)`. A method without
    dropout has none.
    """
    module, _ = predictor(method, samples, seed=seed, example=example)
    return {f"mask{index}": mask.numpy() for index, mask in enumerate(module.sampler.masks)}


def export_program(
    method: Method,
    path: str | Path,
    samples: int | None = None,
    masks: str = "inside",
    *,
    seed: int = 0,
    example: Any = None,
    values: str = "probabilities",
) -> Path:
    """Write the predictor as a `torch.export` program: `torch.export.load(path).module()(x)`.

    The arguments are those of `export_onnx`.
    """
    exported, about = _exported(method, samples, masks, seed, example, values)
    exported._example_inputs = None  # torch would keep them in a pickle
    buffer = io.BytesIO()
    torch.export.save(exported, buffer, extra_files={"stfseb.json": json.dumps(about)})
    return _write(Path(path), buffer.getvalue())


def export_onnx(
    method: Method,
    path: str | Path,
    samples: int | None = None,
    masks: str = "inside",
    *,
    seed: int = 0,
    example: Any = None,
    values: str = "probabilities",
) -> Path:
    """Write the predictor as an ONNX model.

    Args:
        method: a trained method; it is left as it is.
        path: the file to write.
        samples: S, fixed in the graph (by default those of its rules, else of validation, else its own; one where all
            are the same).
        masks: "inside" (constants: the S functions of `seed`) or "input" (inputs mask0, mask1, ... beside x; those
            of a seed come from `masks_for`). Methods without dropout have S sets of weights inside.
        seed: of the masks or weights inside.
        example: one or more rows as the network takes them; needed where the model does not know their shape.
        values: what `samples` holds, "probabilities" or "logits" (calibrated by temperature where the method is);
            a regression's are its outputs either way. `prediction` is their mean.
    """
    try:
        import onnx
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise StfsebError(f"{error.name} is not installed: pip install 'stfseb[export]'") from error
    exported, about = _exported(method, samples, masks, seed, example, values)
    with _quiet():
        program = torch.onnx.export(
            exported, dynamo=True, verbose=False, input_names=about["inputs"], output_names=about["outputs"]
        )
    model = program.model_proto if program is not None else None
    if model is None:
        raise StfsebError("torch could not turn the network into ONNX")
    onnx.helper.set_model_props(model, {"stfseb": json.dumps(about)})
    onnx.checker.check_model(model)
    if any("Dropout" in node.op_type for node in model.graph.node):
        raise StfsebError("the graph has a dropout node, which optimisers delete: report this network")
    return _write(Path(path), model.SerializeToString())


def _exported(
    method: Method, samples: int | None, masks: str, seed: int, example: Any, values: str
) -> tuple[torch.export.ExportedProgram, dict[str, Any]]:
    if masks not in MASKS:
        raise unknown("masks", masks, MASKS)
    module, x = predictor(method, samples, seed=seed, example=example, values=values)
    inputs = module.sampler.masks if masks == "input" else ()
    rows = torch.export.Dim("rows", min=1, max=2**20)
    shapes: tuple[Any, ...] = ({0: rows}, tuple({} for _ in inputs)) if inputs else ({0: rows},)
    try:
        with torch.no_grad():
            program = torch.export.export(module, (x, *inputs), dynamic_shapes=shapes, strict=False)
    except Exception as error:  # torch raises many kinds when it cannot follow someone's forward
        reason = " ".join(str(error).split())[:300]
        raise StfsebError(
            f"torch.export cannot follow {type(method.net).__name__} ({type(error).__name__}: {reason}): write its "
            "forward without branches on values or on the number of rows"
        ) from error
    return program, {
        "stfseb": __version__,
        "method": method.key,
        "inputs": ["x", *(f"mask{index}" for index in range(len(inputs)))],
        "outputs": ["samples", "prediction"],
        "input": list(x.shape[1:]),
        "values": values,
        "samples": _count(method, samples),
        "seed": None if inputs else seed,
        "class_names": method.provenance.get("class_names"),
        "rules": {name: method.calibration[name] for name in ("unfamiliar", "abstain") if name in method.calibration},
    }


def _count(method: Method, samples: int | None) -> int:
    """Return S: by default that of the rules, since thresholds go along; one where all samples are the same."""
    if samples is None:
        samples = method.samples if _is_point(method) else method.rule_draw()[0]
    check_count(samples=samples)
    return samples


def _is_point(method: Method) -> bool:
    return isinstance(method, MAP) or bool(getattr(method, "point", False))


def _sampler(method: Method, samples: int, seed: int, x: Tensor) -> _Sampler:
    if isinstance(method, DropoutMethod):
        return _Masked(method.net, samples, seed, x)
    if isinstance(method, Ensemble):
        shares = method.shares(samples, seed)
        return _Members([_sampler(member, count, s, x) for member, count, s in shares])
    if getattr(method.settings, "prediction", "network") != "network":
        raise StfsebError(
            f"{method.label} with prediction='{method.settings.prediction}' predicts with derivatives of the "
            "network, which are not exported: use prediction='network'"
        )
    if _is_point(method):
        return _Point(method.net, samples)
    if isinstance(method, MeanFieldMethod):
        return _Weighted(method, samples, seed)
    raise StfsebError(f"{type(method).__name__} is not known to the export: subclass a method that is")


def _portable(method: Method) -> Method:
    """Return a copy on the CPU, in float32 at least, in the plain memory layout, without context images."""
    context, method.context = method.context, None
    try:
        twin = copy.deepcopy(method)
    finally:
        method.context = context
    twin.cpu().eval()
    if twin.like.dtype not in (torch.float32, torch.float64):
        twin.float()
    for tensor in (*twin.parameters(), *twin.buffers()):
        tensor.data = tensor.data.contiguous()
    return twin


def _example(method: Method, example: Any) -> Tensor:
    if example is None:
        shape = method.provenance.get("input")
        if not shape:
            raise StfsebError("the model does not say what rows it takes: give example=x, one row or more")
        return torch.zeros(_ROWS, *shape, dtype=method.like.dtype)
    x = scaled(as_tensor(example, "example"), method.like)
    if x.ndim < 2 or not len(x):
        raise StfsebError(f"example has shape {tuple(x.shape)}: give rows, (N, ...)")
    return x[:1].repeat(_ROWS, *(1,) * (x.ndim - 1))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's exporter from speaking of its own deprecations and of libraries that it misses."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _write(path: Path, content: bytes) -> Path:
    with replacing(path) as part:
        part.write_bytes(content)
    return path
