"""Tables 1 and 2, the rotation figures, and time and memory: six methods at their presets."""

from __future__ import annotations

from stfseb.data.tasks import load_task
from stfseb.experiments.paper.plan import (
    Asked,
    Plan,
    Variant,
    assemble,
    corruption_parts,
    label_of,
    methods_of,
    tasks_of,
)
from stfseb.experiments.paper.quantities import auroc_keys, quantities

TITLES = {
    "table1": "Prediction on the test images",
    "table2": "Telling unfamiliar images apart",
    "figure1": "Rotated test images",
    "figure2": "Rotated test images",
    "efficiency": "Training time and memory",
}
_FIGURE_TASKS = {"figure1": ("mnist", "fmnist", "cifar10"), "figure2": ("pathmnist", "organamnist")}
_EPOCHS = 4  # of a measurement of time: the first warms up and is left out


def plan(what: str, asked: Asked) -> Plan:
    """Return the plan of a table or figure in which every method runs at its preset."""
    tasks = tasks_of(asked, _FIGURE_TASKS[what]) if what in _FIGURE_TASKS else tasks_of(asked)
    # Compiled, as long runs are, though four epochs do not earn it back: the time is that of a long run's epoch.
    training = {"epochs": _EPOCHS, "compiled": True, **asked.training} if what == "efficiency" else {}
    variants = [Variant(key, label_of(key), key, training=training) for key in methods_of(asked)]
    loaded = {name: load_task(name) for name in tasks}
    notes: tuple[str, ...] = ()
    if what == "table2":
        found = {name: quantities(*auroc_keys(task)) for name, task in loaded.items()}
        parts = {name: corruption_parts(task) for name, task in loaded.items()}
        notes = ("AUROC of the maximum softmax probability; of corruptions the mean over types, at each severity.",)
    elif what == "efficiency":
        found = {name: quantities("seconds_per_epoch", "peak_memory_mb") for name in tasks}
        parts = dict.fromkeys(tasks, ())
        asked = Asked(asked.tasks, asked.methods, asked.seeds[:1], asked.training, asked.context)
        few = asked.training.get("epochs", _EPOCHS)
        which = f"epochs after the first, up to {few} in all" if few > 1 else "its one epoch, which also warms up"
        notes = (
            f"One run a method, one after the other; {which}.",
            "Memory: the peak of training and validation, the images that lie on the device included.",
            "On a card steps are compiled, as in long runs; 'engine' in the record says how they were run.",
        )
    else:
        found = {name: quantities("acc", "ece", "nll") for name in tasks}
        parts = dict.fromkeys(tasks, ("rotation",) if what in _FIGURE_TASKS else ())
    return assemble(
        what,
        TITLES[what],
        asked,
        tasks,
        dict.fromkeys(tasks, variants),
        found,
        parts,
        by_metric=what in ("table1", "efficiency"),
        alone=what == "efficiency",
        ablation=what == "efficiency",  # costs do not go by the settings that rules choose
        notes=notes,
    )
