"""Risk at 90 % coverage under an unfamiliar mix, of models trained on `mini`: both readings of coverage.

    stfseb train mini --method stfseb --seed 0     # and the others
    python benchmarks/selective.py runs/mini-*/model

Every answer to an unfamiliar image is an error. "Of familiar": 90 % of the familiar test images are answered, and so
are the unfamiliar ones that are no less certain than the least certain of these. "Of the mix": 90 % of all images
are answered, whatever they are; `floor` is then the risk of the same network with a perfect detector, which answers
every familiar image before any unfamiliar one. Mean and standard deviation over the models of a method (its seeds).
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import numpy as np

import stfseb
from stfseb.data.embedded import read
from stfseb.evaluation.selective import risk_coverage

COVERAGE = 0.9


def measured(model: Path) -> tuple[str, dict[str, float]]:
    """Return a model's method, and by name what was measured of it."""
    method = stfseb.load(model)
    method.abstain(COVERAGE)  # from the validation images, with the samples that training judged them by
    parts = {name: read(name) for name in ("test", "mnist", "glyphs")}
    decided = {name: method.decide(part.images) for name, part in parts.items()}
    unsure = {name: found.uncertainty.numpy() for name, found in decided.items()}
    wrong = (decided["test"].prediction.argmax(1) != parts["test"].labels).numpy()
    error, rows = float(wrong.mean()), len(wrong)
    found = {
        "error of all familiar": error,
        "familiar alone, 90 % answered": risk_coverage(unsure["test"], wrong).risk_at(COVERAGE),
    }
    for name in ("mnist", "glyphs"):
        for ratio in (1, 9):
            others = unsure[name][: rows // ratio]
            curve = risk_coverage(
                np.concatenate([unsure["test"], others]),
                np.concatenate([wrong, np.ones(len(others))]),
                np.concatenate([np.ones(rows), np.zeros(len(others))]),
            )
            mix = f"{name}, {ratio}:1"
            answered = COVERAGE * (rows + len(others))
            found[f"{mix}, of familiar"] = curve.risk_at(COVERAGE, of_familiar=True)
            found[f"{mix}, of the mix"] = curve.risk_at(COVERAGE)
            found[f"{mix}, of the mix, floor"] = (max(0.0, answered - rows) + error * min(answered, rows)) / answered
            found[f"{mix}, AURC"] = curve.aurc
    for name, one in decided.items():
        found[f"{name} answered after abstain(0.9)"] = 1.0 - float(one.abstains.double().mean())
    return method.label, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path)
    results: dict[str, list[dict[str, float]]] = defaultdict(list)
    for model in parser.parse_args().models:
        label, found = measured(model)
        results[label].append(found)
    print("| % | " + " | ".join(f"{label} ({len(rows)})" for label, rows in results.items()) + " |")
    print("|---|" + "---|" * len(results))
    for name in next(iter(results.values()))[0]:
        cells = []
        for rows in results.values():
            values = 100 * np.array([row[name] for row in rows])
            cells.append(f"{values.mean():.1f}" + (f" ± {values.std(ddof=1):.1f}" if len(values) > 1 else ""))
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
