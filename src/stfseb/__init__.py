"""Neural networks that know what they do not know.

Function-space empirical Bayes with Student's t priors (ST-FS-EB), the methods it is compared with, and
their evaluation. Names are imported when they are first used, so that the command line starts quickly.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from stfseb._version import __version__
from stfseb.errors import StfsebError

if TYPE_CHECKING:
    from stfseb.distributions import MultivariateStudentT as MultivariateStudentT
    from stfseb.evaluation.calibration import calibrate as calibrate
    from stfseb.evaluation.conformal import fit_sets as fit_sets
    from stfseb.evaluation.conformal import prediction_sets as prediction_sets
    from stfseb.evaluation.evaluate import evaluate as evaluate
    from stfseb.evaluation.selective import selective as selective
    from stfseb.function_prior import FunctionPrior as FunctionPrior
    from stfseb.methods.base import Method as Method
    from stfseb.methods.base import Terms as Terms
    from stfseb.methods.ensemble import Ensemble as Ensemble
    from stfseb.methods.fs_eb import FSEB as FSEB
    from stfseb.methods.gfsvi import GFSVI as GFSVI
    from stfseb.methods.map import MAP as MAP
    from stfseb.methods.mc_dropout import MCDropout as MCDropout
    from stfseb.methods.mfvi import MFVI as MFVI
    from stfseb.methods.outlier_exposure import OutlierExposure as OutlierExposure
    from stfseb.methods.predictor import Predictor as Predictor
    from stfseb.methods.saving import load as load
    from stfseb.methods.saving import save as save
    from stfseb.methods.st_fs_eb import STFSEB as STFSEB
    from stfseb.networks.cnn import DeepCNN as DeepCNN
    from stfseb.networks.cnn import SmallCNN as SmallCNN
    from stfseb.networks.mlp import MLP as MLP
    from stfseb.processes import StudentTProcess as StudentTProcess
    from stfseb.training.fit import FitResult as FitResult
    from stfseb.training.fit import fit as fit
    from stfseb.training.interrupts import Interrupted as Interrupted
    from stfseb.training.population import fit_population as fit_population
    from stfseb.weight_prior import WeightPrior as WeightPrior

_WHERE = {
    "MultivariateStudentT": "distributions",
    "StudentTProcess": "processes",
    "FunctionPrior": "function_prior",
    "WeightPrior": "weight_prior",
    "SmallCNN": "networks.cnn",
    "DeepCNN": "networks.cnn",
    "MLP": "networks.mlp",
    "Method": "methods.base",
    "Terms": "methods.base",
    "STFSEB": "methods.st_fs_eb",
    "MCDropout": "methods.mc_dropout",
    "MAP": "methods.map",
    "MFVI": "methods.mfvi",
    "FSEB": "methods.fs_eb",
    "GFSVI": "methods.gfsvi",
    "Ensemble": "methods.ensemble",
    "OutlierExposure": "methods.outlier_exposure",
    "Predictor": "methods.predictor",
    "fit": "training.fit",
    "fit_population": "training.population",
    "FitResult": "training.fit",
    "Interrupted": "training.interrupts",
    "evaluate": "evaluation.evaluate",
    "calibrate": "evaluation.calibration",
    "fit_sets": "evaluation.conformal",
    "prediction_sets": "evaluation.conformal",
    "selective": "evaluation.selective",
    "save": "methods.saving",
    "load": "methods.saving",
}

__all__ = ["StfsebError", "__version__", *sorted(_WHERE)]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'stfseb' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"stfseb.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
