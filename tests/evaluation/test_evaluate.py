"""The one pass: every kind of split, chunking, and errors that name what is wrong."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score
from torch.utils.data import DataLoader, Dataset, TensorDataset

from stfseb.data.images import ImageSet
from stfseb.errors import StfsebError
from stfseb.evaluation import assess, evaluate

CLASSES = 3


class Linear:
    """A fake method: linear logits under seeded weight samples that are the same for every chunk."""

    classes = CLASSES
    label = "fake"

    def __init__(self):
        self.rows = 0

    def sample_logits(self, x, samples=None, *, seed=None):
        self.rows += len(x)
        pixels = (x.float() / 255 if x.dtype == torch.uint8 else x).flatten(1)
        generator = torch.Generator().manual_seed(seed or 0)
        weights = torch.randn(samples or 2, pixels.shape[1], CLASSES, generator=generator)
        return torch.einsum("bd,sdl->sbl", pixels, weights)


class Pairs(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], int(self.y[i])


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (90, 1, 4, 4), generator=generator, dtype=torch.uint8)
    y = torch.randint(0, CLASSES, (90,), generator=generator)
    far = torch.randint(0, 40, (50, 1, 4, 4), generator=generator, dtype=torch.uint8)
    return x, y, far


def test_numbers_agree_with_scikit_learn(data):
    x, y, far = data
    found = evaluate(Linear(), (x, y), {"far": far}, samples=5, seed=3)
    probs = Linear().sample_logits(x, 5, seed=3).double().softmax(-1).mean(0).numpy()
    other = Linear().sample_logits(far, 5, seed=3).double().softmax(-1).mean(0).numpy()
    assert found["acc"] == (probs.argmax(-1) == y.numpy()).mean()
    assert found["nll"] == pytest.approx(log_loss(y, probs, labels=range(CLASSES)), abs=1e-9)
    truth = np.r_[np.zeros(90), np.ones(50)]
    score = -np.r_[probs.max(-1), other.max(-1)]
    assert found["auroc/far"] == pytest.approx(roc_auc_score(truth, score), abs=1e-9)
    assert set(found) == {"acc", "nll", "ece", "brier"} | {
        f"{metric}/far{score}"
        for metric in ("auroc", "aupr", "fpr95")
        for score in ("", "/entropy", "/mutual_information")
    }
    assert all(isinstance(v, float) for v in found.values())


@pytest.mark.parametrize("batch_size", [1, 7, 90, 1000])
def test_chunks_change_nothing(data, batch_size):
    x, y, far = data
    whole = evaluate(Linear(), (x, y), {"far": far})
    assert evaluate(Linear(), (x, y), {"far": far}, batch_size=batch_size) == pytest.approx(whole, abs=1e-7)


def test_every_kind_of_split_gives_the_same(data):
    x, y, far = data
    expected = evaluate(Linear(), (x, y), {"far": far}, batch_size=32)
    read_only = x.numpy().copy()
    read_only.flags.writeable = False
    for test, unfamiliar in [
        ([x.numpy(), y.numpy()], far.numpy()),
        ((read_only, y.tolist()), far),
        (ImageSet("t", x, y), ImageSet("f", far)),
        (TensorDataset(x, y), TensorDataset(far)),
        (Pairs(x, y), Pairs(far, torch.zeros(50))),
        (DataLoader(Pairs(x, y), batch_size=11), DataLoader(TensorDataset(far), batch_size=9)),
        ((x.float() / 255, y), far.float() / 255),
    ]:
        found = evaluate(Linear(), test, {"far": unfamiliar}, batch_size=32)
        assert found == pytest.approx(expected, abs=1e-6)


def test_one_pass_gives_metrics_and_summary(data):
    x, y, far = data
    method = Linear()
    whole = assess(method, (x, y), {"far": far}, samples=4)
    assert method.rows == 140  # the network sees every image once
    assert whole.metrics == evaluate(Linear(), (x, y), {"far": far}, samples=4)
    summary = json.loads(json.dumps(whole.summary))
    assert summary == whole.summary
    assert summary["samples"] == 4
    assert sum(summary["reliability"]["count"]) == 90
    assert sum(summary["confidence"]["test"]) == 90
    assert sum(summary["confidence"]["ood"]["far"]) == 50
    assert len(summary["confidence"]["test"]) == 50

    probs = Linear().sample_logits(x, 4, seed=0).double().softmax(-1).mean(0)
    order = probs.max(-1).values.argsort(descending=True).tolist()
    extremes = summary["extremes"]["test"]
    assert [row["index"] for row in extremes["most"]] == order[:8]
    assert [row["index"] for row in extremes["least"]] == order[::-1][:8]
    first = extremes["most"][0]
    assert first["label"] == int(y[order[0]])
    assert first["prediction"] == int(probs[order[0]].argmax())
    assert first["confidence"] == pytest.approx(float(probs[order[0]].max()), abs=1e-6)

    curve = summary["risk_coverage"]
    wrong = (probs.argmax(-1) != y)[order].numpy()
    assert curve["coverage"][-1] == 1.0
    assert curve["risk"][-1] == pytest.approx(1 - whole.metrics["acc"], abs=1e-6)
    assert curve["risk"][9] == pytest.approx(wrong[:10].mean(), abs=1e-6)


def test_equal_scores_enter_the_risk_coverage_curve_together():
    class Constant(Linear):
        def sample_logits(self, x, samples=None, *, seed=None):
            return torch.zeros(1, len(x), CLASSES)

    x, y = torch.zeros(6, 1, 2, 2), torch.tensor([0, 1, 2, 0, 1, 2])
    found = assess(Constant(), (x, y), {"far": x})
    assert found.summary["risk_coverage"] == {"coverage": [1.0], "risk": [pytest.approx(2 / 3, abs=1e-6)]}
    assert found.metrics["auroc/far"] == 0.5
    assert found.metrics["nll"] == pytest.approx(math.log(3))


def test_summary_without_ood_and_short_sets(data):
    x, y, _ = data
    summary = assess(Linear(), (x[:3], y[:3])).summary
    assert summary["roc"] == {}
    assert len(summary["extremes"]["test"]["most"]) == 3


class Broken(Linear):
    classes = None  # a network that has not said how many it has

    def __init__(self, output):
        super().__init__()
        self.output = output

    def sample_logits(self, x, samples=None, *, seed=None):
        return self.output(x)


def test_bad_input_is_one_line_that_names_it(data):
    x, y, far = data
    floats = x.float() / 255
    nan = floats.clone()
    nan[4, 0, 1, 1] = math.nan
    cases = [
        ({"test": (x[:0], y[:0])}, "test: the split is empty"),
        ({"test": (x, y), "ood": {"far": far[:0]}}, "ood 'far': the split is empty"),
        ({"test": (x, y + 1)}, "label 3 is outside the classes 0..2"),
        ({"test": (x, y - 1)}, "label -1 is outside"),
        ({"test": (nan, y)}, "test has NaN or infinite values in 1 rows"),
        ({"test": (floats + math.inf, y)}, "infinite"),
        ({"test": (x, y[:-1])}, "90 images but 89 labels"),
        ({"test": (x, y[:, None])}, "shape \\(32,\\), not \\(32, 1\\)"),
        ({"test": (x, y.float())}, "labels must be integers, not torch.float32"),
        ({"test": (x.long(), y)}, "dtype torch.int64: give uint8"),
        ({"test": x}, "test: no labels"),
        (
            {"test": (x, y), "ood": {"far": far[:, :, :3]}},
            "\\(1, 3, 4\\), but the test images are \\(1, 4, 4\\)",
        ),
        ({"test": "folder"}, "test: cannot read a str; give tensors"),
        ({"test": 7}, "cannot read a int"),
        ({"test": (x, y), "ood": {"a/entropy": far}}, "rename it"),
        ({"test": (x, y), "ood": far}, "ood is a Tensor: give sets by name"),
        ({"test": (x, y), "ood": [far]}, "ood is a list: give sets by name"),
        ({"test": (x, y), "ood": {3: far}}, "ood set name 3 is a int"),
        ({"test": (x, y), "samples": 0}, "samples=0: must be a whole number"),
        ({"test": (x, y), "samples": "3"}, "samples=3: must be a whole number"),
        ({"test": (x, y), "bins": 2.5}, "bins=2.5: must be a whole number"),
        ({"test": (x, y), "bins": 0}, "bins=0: must be a whole number"),
        ({"method": torch.nn.Linear(4, 3), "test": (x, y)}, r"method is a Linear, .*: wrap it, stfseb.MAP\(net\)"),
        ({"method": Broken(lambda x: torch.full((2, len(x), 3), math.nan)), "test": (x, y)}, "not finite"),
        ({"method": Broken(lambda x: torch.zeros(len(x), 3)), "test": (x, y)}, "gave shape \\(32, 3\\)"),
        ({"method": Broken(lambda x: torch.zeros(2, len(x), 1)), "test": (x, y)}, "at least two classes"),
        ({"method": Broken(lambda x: torch.zeros(2, len(x), 2)), "test": (x, y)}, "label 2 is outside the 2"),
        ({"method": Broken(Linear().sample_logits), "test": (x, y - 1)}, "label -1 is outside the classes 0, 1"),
    ]
    for case, message in cases:
        with pytest.raises(StfsebError, match=message) as error:
            evaluate(**({"method": Linear(), "batch_size": 32} | case))
        assert "\n" not in str(error.value)
