"""Which reading of the paper comes nearest to its printed rows? One switch at a time, and all of them.

The paper leaves open whether the function term enters once per minibatch or once per epoch, what the frozen
extractor is, and whether the context rows of a sample share a dropout mask.
"""

from __future__ import annotations

from stfseb.experiments.paper.plan import Asked, Plan, Variant, assemble_with_aurocs, tasks_of

TASKS = ("cifar10", "fmnist")
_SCALES = {"batch": "per minibatch", "epoch": "per epoch"}
_EXTRACTORS = {"init": "copied", "independent": "independent", "he": "He-initialised"}
_MASKS = {"shared": "one mask", "row": "a mask a row"}


def variants() -> list[Variant]:
    """Return every combination, the one that the library takes by default first."""
    found = []
    for scale, term in _SCALES.items():
        for extractor in _EXTRACTORS:
            for mask, rows in _MASKS.items():
                settings = {"functional_scale": scale, "extractor": extractor, "context_mask": mask}
                # A setting at its default is left out, so that the preset's runs serve.
                kept = {k: v for k, v in settings.items() if v not in ("batch", "init", "shared")}
                key = f"{scale}-{extractor}-{mask}"
                found.append(Variant(key, f"{term}, {_EXTRACTORS[extractor]}, {rows}", "stfseb", kept))
    return found


def plan(what: str, asked: Asked) -> Plan:
    """Return the plan of all readings on CIFAR-10 and Fashion-MNIST."""
    return assemble_with_aurocs(
        what,
        "Readings of the paper: function term, extractor, context masks",
        asked,
        tasks_of(asked, TASKS),
        lambda _: variants(),
        variants_down=True,
        ablation=True,
        notes=("All at the same dof, sigma and tau, which were chosen under the first reading.",),
    )
