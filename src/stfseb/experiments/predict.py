"""Predictions for a user's own images, in words: class, probability, and why the model would rather not say."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stfseb.data.pictures import all_unread
from stfseb.errors import StfsebError
from stfseb.evaluation.conformal import prediction_sets
from stfseb.experiments.pictures import read_inputs
from stfseb.methods.decisions import ABSTAIN, CONFORMAL, UNFAMILIAR

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stfseb.methods.base import Method
    from stfseb.methods.decisions import Decisions

_NO_RULE = (
    "The model has no threshold for unfamiliar images, as training sets it from 19 held-back images on: "
    "'stfseb calibrate MODEL FOLDER' sets it on labelled images."
)


def predict_files(
    method: Method,
    paths: Sequence[str | Path],
    samples: int | None = None,
    *,
    coverage: float | None = None,
    unread: dict[Path, StfsebError] | None = None,
) -> list[dict[str, Any]]:
    """Return one row an image; all files are read before the first prediction.

    `coverage` sets the rule of `method.abstain` anew, from the held-out images that the model remembers. Pictures that
    cannot be read are an error that names them; where `unread` is given they are put there, and the others predicted.
    """
    shape = method.provenance.get("input")
    if not shape:
        raise StfsebError(
            "the model does not say what images it takes: train it with 'stfseb train' or 'compare', or say it, "
            "method.provenance |= {'input': [C, H, W], 'class_names': [...]}"
        )
    names, images = [], []
    for path in paths:
        found, pixels = read_inputs(Path(path), tuple(shape), unread)
        names += found
        images.append(pixels if pixels.is_floating_point() else pixels.float() / 255.0)
    if not names and unread:
        raise all_unread(unread, len(unread))
    if not names:
        raise StfsebError("no images were given")
    if coverage is not None:
        method.abstain(coverage)
    x = torch.cat(images)
    decisions = method.judged(x, samples)
    sets = prediction_sets(method, x) if CONFORMAL in method.calibration else None
    return in_words(method, names, decisions, sets)


def in_words(method: Method, names: Sequence[str], decisions: Decisions, sets: Any = None) -> list[dict[str, Any]]:
    """Return one row an image that says what a method decided (and which classes are plausible), in words."""
    classes = method.provenance.get("class_names") or [str(i) for i in range(decisions.prediction.shape[1])]
    rows = []
    for i, (name, probs) in enumerate(zip(names, decisions.prediction.tolist(), strict=True)):
        best = max(range(len(probs)), key=probs.__getitem__)
        plausible = None if sets is None else [classes[k] for k in sets[i].nonzero()[0]]
        unfamiliar, unsure = bool(decisions.unfamiliar[i]), bool(decisions.abstains[i])
        confidence = -math.expm1(float(decisions.uncertainty[i]))
        reasons = [
            words
            for applies, words in (
                (unfamiliar, _unfamiliar(method, confidence)),
                (unsure and not unfamiliar, _unsure(method, confidence, probs, classes)),
                (plausible == [], _nothing_plausible(method)),
            )
            if applies
        ]
        row: dict[str, Any] = {
            "image": name,
            "class": classes[best],
            "probability": probs[best],
            "unfamiliar": unfamiliar,
            "abstains": bool(reasons),
            "why": "; ".join(reasons),
            "rule": rules_in_words(method),
        }
        if plausible is not None:
            row["plausible"] = plausible
        rows.append(row)
    return rows


def counts_in_words(rows: Sequence[dict[str, Any]]) -> str:
    """Return how many images of `in_words` look unfamiliar, and for how many more the model abstains."""
    unfamiliar = sum(row["unfamiliar"] for row in rows)
    others = sum(row["abstains"] and not row["unfamiliar"] for row in rows)
    return f"{unfamiliar} of {len(rows)} unfamiliar, {others} more without an answer."


def samples_in_words(method: Method, samples: int | None) -> str:
    """Say that thresholds were set with another number of samples than predictions take; nothing where not.

    Sets of plausible classes take their own number in any case.
    """
    rules = [rule for name in (UNFAMILIAR, ABSTAIN) if (rule := method.calibration.get(name))]
    own = {int(rule["samples"]) for rule in rules if "samples" in rule}
    if samples is None or not own - {samples} or not hasattr(method.settings, "samples"):
        return ""
    listed = " and ".join(map(str, sorted(own)))
    return (
        f"the model's thresholds were set with {listed} samples and are used with {samples}, which changes how often "
        "they apply: leave --samples out"
    )


def rules_in_words(method: Method) -> str:
    """Return the model's rules in words."""
    words = []
    if unfamiliar := method.calibration.get(UNFAMILIAR):
        words.append(
            f"An image looks unfamiliar when its highest probability is below {_limit(unfamiliar)}; "
            f"{unfamiliar['false_alarms']:.0%} of {unfamiliar['images']} held-out images are."
        )
    if abstain := method.calibration.get(ABSTAIN):
        risk = f", {abstain['risk']:.1%} of them wrongly" if "risk" in abstain else ""
        words.append(
            f"Below {_limit(abstain)} the model abstains: it answered {abstain['coverage']:.0%} of the held-out "
            f"images{risk}."
        )
    if sets := method.calibration.get(CONFORMAL):
        words.append(
            f"The true class is among the plausible ones for {sets['coverage']:.0%} of images like the "
            f"{sets['rows']} it was calibrated on."
        )
    return " ".join(words) or _NO_RULE


def _unfamiliar(method: Method, confidence: float) -> str:
    if not (rule := method.calibration.get(UNFAMILIAR)):
        return ""
    return (
        f"looks unfamiliar: the highest probability, {_rounded(confidence)}, is below {_limit(rule)}, as for only "
        f"{rule['false_alarms']:.0%} of familiar images"
    )


def _unsure(method: Method, confidence: float, probs: list[float], classes: Sequence[str]) -> str:
    if not (rule := method.calibration.get(ABSTAIN)):
        return ""
    first, second = sorted(range(len(probs)), key=probs.__getitem__, reverse=True)[:2]
    return (
        f"is not certain enough: {classes[first]} {_rounded(confidence)}, {classes[second]} {_rounded(probs[second])}; "
        f"it answers from {_limit(rule)} on"
    )


def _nothing_plausible(method: Method) -> str:
    coverage = method.calibration.get(CONFORMAL, {}).get("coverage", math.nan)
    return f"finds no class plausible enough for a set that is right {coverage:.0%} of the time"


def _limit(rule: dict[str, Any]) -> str:
    """Return the probability at a threshold on log(1 - highest probability)."""
    return _rounded(-math.expm1(rule["threshold"]))


def _rounded(probability: float) -> str:
    """Show three digits, and more where they would say 1.000."""
    digits = 3 if probability < 0.9995 else min(12, 1 - math.floor(math.log10(max(1.0 - probability, 1e-12))))
    return f"{probability:.{digits}f}"
