"""scikit-learn estimators: `STFSEBClassifier`, `STFSEBRegressor`, and the same for every other method.

They take arrays of features (N, p), standardised inside, or images (N, C, H, W), scaled to [0, 1] when uint8, and
train a multilayer perceptron with dropout unless given a network. Features are computed in float64 and predictions
use one fixed set of masks for all rows, so that a prediction does not depend on which rows are asked for together.

The classes are made from the methods' registry: besides `Estimator`'s own parameters each has its method's settings
as parameters (see, for example, `STFSEBSettings`), so that `GridSearchCV` finds `tau2` or `dof` by name.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import nn

from stfseb.data.augmentation import distorted
from stfseb.errors import StfsebError, unknown
from stfseb.likelihoods import Categorical, GaussianRegression, Likelihood, Regression, StudentTRegression
from stfseb.methods.registry import KEYS, method_class
from stfseb.networks.cnn import SmallCNN
from stfseb.networks.mlp import MLP
from stfseb.training.fit import fit

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise StfsebError("scikit-learn is not installed: pip install 'stfseb[sklearn]'") from error

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from stfseb.methods.base import Method

    Array = NDArray[Any]

CONTEXTS = ("noise", "held-back", "train", "distorted")
_CLASSES_ONLY = ("gfsvi", "outlierexposure")
_FEWEST = 40  # below this many rows none are held back: too few to judge an epoch by
_COMMON: dict[str, Any] = {
    "net": None,
    "hidden": (64,),
    "dropout": 0.1,
    "epochs": 100,
    "batch_size": 32,
    "lr": 0.01,
    "patience": 20,
    "validation_fraction": 0.1,
    "predict_samples": 32,
    "device": "cpu",
    "random_state": None,
}


class Estimator(BaseEstimator):  # type: ignore[misc]
    """What all estimators share.

    Parameters
    ----------
    net : nn.Module, callable or None
        The network (copied, never changed), or a callable (shape of one row, outputs) -> network. None: an `MLP`
        of `hidden` units with `dropout`, or `SmallCNN` for images.
    hidden, dropout : the default network's layers and dropout rate.
    context : None, "noise", "held-back", "train", "distorted" or array
        What the function prior looks at, for methods that have one. "noise" (the default): normal rows of twice
        the training rows' standard deviation, or images of pixels drawn from the training images; "held-back":
        the rows kept for early stopping, without their labels; "train": rows of the minibatch; "distorted": the
        training images turned, zoomed, shifted and some inverted; or rows of your own.
    epochs, batch_size, lr, patience : of `stfseb.fit`.
    validation_fraction : float
        Rows held back for early stopping; of fewer than 40 rows none are.
    predict_samples : int
        Monte Carlo samples of a prediction.
    device : where to train and predict.
    random_state : int, RandomState or None.
    """

    _key: ClassVar[str]
    _defaults: ClassVar[dict[str, Any]]
    _settings: ClassVar[tuple[str, ...]]

    def __init__(self, **parameters: Any) -> None:
        for name in parameters:
            if name not in self._defaults:
                raise TypeError(f"{type(self).__name__} has no parameter '{name}'")
        for name, default in self._defaults.items():
            setattr(self, name, parameters.get(name, default))

    # Training ----------------------------------------------------------------------------------------

    def _train(self, x: Array, y: Tensor, outputs: int, likelihood: Likelihood) -> None:
        """Train the method on checked arrays; leave `method_`, `seed_`, `history_` and `n_iter_`."""
        random = check_random_state(self.random_state)
        self.seed_ = int(random.randint(2**31 - 1))
        self._learn_scaling(x)
        rows = self._rows(x)
        held = round(len(x) * self.validation_fraction) if len(x) >= _FEWEST else 0
        order = torch.from_numpy(random.permutation(len(x)))
        kept, back = order[held:], order[:held] if held else order
        cls = method_class(self._key)
        settings = {name: getattr(self, name) for name in self._settings}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed_)
            net = self._network(rows, outputs)
            if "context" in self._defaults:
                settings["context"] = self._context(rows[kept], rows[back], random)
            method: Method = cls(net, **settings, likelihood=likelihood)
            result = fit(
                method,
                (rows[kept], y[kept]),
                (rows[back], y[back]),
                epochs=self.epochs,
                batch_size=self.batch_size,
                lr=self.lr,
                patience=self.patience,
                seed=self.seed_,
                device=self.device,
                progress=False,
            )
        method.context = None  # only training needs it, and pickles stay small
        self.method_, self.history_, self.n_iter_ = method, result.history, len(result.history)

    def _network(self, rows: Tensor, outputs: int) -> nn.Module:
        shape = tuple(rows.shape[1:])
        if isinstance(self.net, nn.Module):
            net = copy.deepcopy(self.net)
        elif self.net is not None:
            net = self.net(shape, outputs)
        elif len(shape) == 3 and shape[1] == shape[2] >= 4:
            net = SmallCNN(shape[0], outputs, self.dropout, shape[1])
        else:
            net = MLP(int(np.prod(shape)), outputs, tuple(self.hidden), self.dropout)
        return net.to(torch.float64 if len(shape) == 1 else torch.float32)

    def _context(self, kept: Tensor, back: Tensor, random: np.random.RandomState) -> Any:
        context = "noise" if self.context is None else self.context
        if not isinstance(context, str):
            return self._rows(np.asarray(context))
        if context == "train":
            return context
        points = max(4 * int(self.num_context), 256)
        if context == "held-back":
            return back.repeat(-(-int(self.num_context) // len(back)), *(1,) * (back.ndim - 1))
        if context == "distorted":
            return distorted(kept)
        if context != "noise":
            raise unknown("context", context, CONTEXTS)
        if kept.ndim == 2:
            return torch.from_numpy(2.0 * random.standard_normal((points, kept.shape[1])))
        pixels = kept.flatten().numpy()
        return torch.from_numpy(pixels[random.randint(len(pixels), size=(points, *kept.shape[1:]))])

    # Rows --------------------------------------------------------------------------------------------

    def _learn_scaling(self, x: Array) -> None:
        self.shape_in_ = x.shape[1:]
        if x.ndim == 2:
            self.feature_mean_ = x.mean(0)
            scale = x.std(0)
            self.feature_scale_ = np.where(scale > 0, scale, 1.0)

    def _rows(self, x: Array) -> Tensor:
        """Return rows as the network takes them."""
        if x.shape[1:] != self.shape_in_:
            name = type(self).__name__
            raise StfsebError(f"rows have shape {x.shape[1:]}, but {name} was fitted on {self.shape_in_}")
        if x.ndim == 2:
            return torch.from_numpy((x - self.feature_mean_) / self.feature_scale_)
        return torch.from_numpy(np.array(x if x.dtype == np.uint8 else x.astype(np.float32)))

    def _checked(self, x: Any, y: Any, **checks: Any) -> tuple[Array, Array]:
        """Check training data as scikit-learn does; features become float64, uint8 images stay."""
        x, y = validate_data(self, x, y, ensure_min_samples=2, allow_nd=True, **checks)
        return _real(x), y

    def _inputs(self, x: Any) -> Tensor:
        """Check rows to predict and return them as the network takes them."""
        check_is_fitted(self)
        return self._rows(_real(validate_data(self, x, reset=False, allow_nd=True)))

    def uncertainty(self, X: Any) -> Array:  # noqa: N803
        """Return one number a row that grows as the prediction becomes less certain."""
        x = self._inputs(X)
        found: Array = self.method_.judged(x, self.predict_samples, seed=self.seed_).uncertainty.cpu().numpy()
        return found


class Classifier(ClassifierMixin, Estimator):  # type: ignore[misc]
    """One class a row."""

    def fit(self, X: Any, y: Any) -> Classifier:  # noqa: N803
        """Train on rows and their classes (numbers or words)."""
        x, y = self._checked(X, y)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"{type(self).__name__} needs at least two classes: the data has one class")
        self._train(x, torch.from_numpy(labels), len(self.classes_), Categorical())
        return self

    def predict_proba(self, X: Any) -> Array:  # noqa: N803
        """Return probabilities, (N, classes), in the order of `classes_`."""
        x = self._inputs(X)
        probs: Array = self.method_.predict_proba(x, self.predict_samples, seed=self.seed_).double().cpu().numpy()
        probs /= probs.sum(1, keepdims=True)
        return probs

    def predict(self, X: Any) -> Array:  # noqa: N803
        """Return the most probable class of each row."""
        probs = self.predict_proba(X)
        chosen: Array = self.classes_[probs.argmax(1)]
        return chosen


class Regressor(RegressorMixin, Estimator):  # type: ignore[misc]
    """Real targets, one or several a row; standardised inside, so that the prior's zero is their mean.

    `likelihood` is "gaussian", "student_t" or a `Regression` likelihood, in units of the standardised targets.
    """

    def fit(self, X: Any, y: Any) -> Regressor:  # noqa: N803
        """Train on rows and their targets, (N,) or (N, D)."""
        x, y = self._checked(X, y, multi_output=True, y_numeric=True)
        self.target_shape_ = y.shape[1:]
        targets = np.asarray(y, dtype=np.float64).reshape(len(y), -1)
        scale = targets.std(0)
        self.target_mean_, self.target_scale_ = targets.mean(0), np.where(scale > 0, scale, 1.0)
        standard = torch.from_numpy((targets - self.target_mean_) / self.target_scale_)
        self._train(x, standard, targets.shape[1], _noise(self.likelihood, targets.shape[1]))
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:  # noqa: N803
        """Return the means, and with `return_std` also the standard deviations, noise included."""
        x = self._inputs(X)
        mean = self.method_.predict(x, self.predict_samples, seed=self.seed_)
        found = self._target(mean, shift=True)
        if not return_std:
            return found
        return found, self._target(self.method_.predict_std(x, self.predict_samples, seed=self.seed_), shift=False)

    def predict_interval(self, X: Any, level: float = 0.95) -> tuple[Array, Array]:  # noqa: N803
        """Return the ends of the central interval that holds a target with probability `level`."""
        x = self._inputs(X)
        low, high = self.method_.predict_interval(x, level, self.predict_samples, seed=self.seed_)
        return self._target(low, shift=True), self._target(high, shift=True)

    def _target(self, values: Tensor, *, shift: bool) -> Array:
        found: Array = values.double().cpu().numpy() * self.target_scale_ + shift * self.target_mean_
        return found.reshape(len(found), *self.target_shape_)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def _real(x: Array) -> Array:
    return x if x.ndim > 2 and x.dtype == np.uint8 else np.asarray(x, dtype=np.float64)


def _noise(likelihood: Any, targets: int) -> Regression:
    if isinstance(likelihood, Regression):
        return copy.deepcopy(likelihood)
    kinds: dict[str, type[Regression]] = {"gaussian": GaussianRegression, "student_t": StudentTRegression}
    if likelihood not in kinds:
        raise unknown("likelihood", str(likelihood), kinds)
    return kinds[likelihood](targets=targets)


def _make(key: str, base: type[Estimator], suffix: str) -> type[Estimator] | None:
    """Return the estimator of one method, with its settings as parameters, or None where it makes no sense."""
    cls = method_class(key)
    constructor = inspect.signature(cls.__init__).parameters
    if "net" not in constructor or (base is Regressor and key in _CLASSES_ONLY):
        return None
    defaults = {f.name: f.default for f in fields(cls.settings_type) if f.default is not MISSING}  # type: ignore[arg-type]
    defaults |= {n: p.default for n, p in constructor.items() if n in defaults and p.default is not p.empty}
    common = {**_COMMON, "context": None} if "context" in constructor else dict(_COMMON)
    if base is Regressor:
        common["likelihood"] = "gaussian"
    everything = {**common, **defaults}
    parameters = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=d) for n, d in everything.items()]

    def __init__(self: Estimator, **given: Any) -> None:  # noqa: N807
        Estimator.__init__(self, **given)

    self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    __init__.__signature__ = inspect.Signature([self_parameter, *parameters])  # type: ignore[attr-defined]
    name = cls.__name__ + suffix
    about = f"{cls.label} as a scikit-learn estimator. {base.__doc__}\n\n{Estimator.__doc__}"
    body = {
        "__init__": __init__,
        "__doc__": about,
        "__module__": __name__,
        "__qualname__": name,
        "_key": key,
        "_defaults": everything,
        "_settings": tuple(defaults),
    }
    return type(name, (base,), body)


ESTIMATORS: dict[str, type[Estimator]] = {
    made.__name__: made
    for key in KEYS
    for base, suffix in ((Classifier, "Classifier"), (Regressor, "Regressor"))
    if (made := _make(key, base, suffix)) is not None
}
globals().update(ESTIMATORS)
__all__ = ["ESTIMATORS", "Classifier", "Estimator", "Regressor", *ESTIMATORS]  # noqa: PLE0604

if TYPE_CHECKING:
    STFSEBClassifier: type[Classifier]
    STFSEBRegressor: type[Regressor]
    MCDropoutClassifier: type[Classifier]
    MCDropoutRegressor: type[Regressor]
    MAPClassifier: type[Classifier]
    MAPRegressor: type[Regressor]
    MFVIClassifier: type[Classifier]
    MFVIRegressor: type[Regressor]
    FSEBClassifier: type[Classifier]
    FSEBRegressor: type[Regressor]
    GFSVIClassifier: type[Classifier]
