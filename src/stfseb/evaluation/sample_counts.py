"""What do more Monte Carlo samples buy? Every metric for several Xi, from one trained model and one pass.

The largest number of samples is drawn once; smaller numbers use disjoint groups of the same samples, and their
metrics are averaged over up to `repeats` groups, so that the row for Xi = 1 does not hang on one lucky mask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stfseb.errors import StfsebError
from stfseb.evaluation.evaluate import SamplesLogits, batch_size_of, metrics_of, predict_groups, unfamiliar_sets
from stfseb.likelihoods import Classification
from stfseb.methods.base import Method
from stfseb.methods.settings import check_count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stfseb.evaluation.inputs import Split

COUNTS = (1, 10, 100)


def sample_counts(
    method: SamplesLogits,
    test: Split,
    ood: Mapping[str, Split] | None = None,
    *,
    counts: Sequence[int] = COUNTS,
    repeats: int = 10,
    seed: int | None = 0,
    bins: int = 15,
    batch_size: int | None = None,
) -> dict[int, dict[str, float]]:
    """Return the metrics of `evaluate` for each number of samples: Xi -> name -> value.

    Args:
        method: a trained classifier.
        test: images with labels.
        ood: sets of unfamiliar images by name.
        counts: the numbers of samples; the largest is drawn.
        repeats: average a row over this many disjoint groups at most.
        seed: of the masks or weights.
        bins: of the calibration error.
        batch_size: images in one pass.
    """
    check_count(repeats=repeats, bins=bins)
    if batch_size is not None:
        check_count(batch_size=batch_size)
    wanted = sorted(set(counts))
    if not wanted:
        raise StfsebError("counts is empty: give numbers of samples, for example (1, 10, 100)")
    for count in wanted:
        check_count(counts=count)
    if isinstance(method, Method) and not isinstance(method.likelihood, Classification):
        raise StfsebError(f"sample_counts is for classes, not for the {method.likelihood.name} likelihood")
    sets = unfamiliar_sets(ood)
    most = wanted[-1]
    owners, groups = [], []
    for count in wanted:
        for k in range(min(repeats, most // count)):
            owners.append(count)
            groups.append(slice(k * count, (k + 1) * count))
    size = batch_size or batch_size_of(method)
    test_groups, labels = predict_groups(method, test, "test", size, most, seed, groups, labels=True)
    shape = test_groups[0].image_shape
    others = {
        name: predict_groups(method, images, f"ood '{name}'", size, most, seed, groups, shape=shape)[0]
        for name, images in sets.items()
    }
    rows: dict[int, list[dict[str, float]]] = {count: [] for count in wanted}
    for index, count in enumerate(owners):
        unfamiliar = {name: found[index] for name, found in others.items()}
        rows[count].append(metrics_of(test_groups[index], labels, unfamiliar, bins))
    return {
        count: {name: sum(row[name] for row in found) / len(found) for name in found[0]}
        for count, found in rows.items()
    }
