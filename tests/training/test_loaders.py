"""Loaders of a user: whose rows count as the data set, and what the history is divided by."""

import os
import signal

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from stfseb import MAP, MCDropout, StfsebError, fit
from stfseb.training.batches import SamplerWarning, make_batches
from stfseb.training.interrupts import Interrupted

ROWS = 64


@pytest.fixture
def data():
    return torch.rand(ROWS, 8), torch.randint(3, (ROWS,))


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


def entry(train, data, **settings):
    """Return the history of one epoch that leaves the weights where they are."""
    (found,) = fit(MAP(make()), train, data, epochs=1, lr=1e-12, progress=False, **settings).history
    return {name: found[name] for name in ("data", "weights")}


class Every(Sampler):
    """A sampler of somebody's own: every second row."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(0, self.count, 2))

    def __len__(self):
        return self.count // 2


class Endless(Every):
    """The same without a length."""

    __len__ = None


def test_a_sampler_whose_rows_may_be_others_in_other_epochs_is_named(data):
    rows = TensorDataset(*data)
    with pytest.warns(SamplerWarning, match=r"Every has 32 of the data set's 64 rows.*RandomSampler\(data"):
        make_batches(DataLoader(rows, 16, sampler=Every(64)), 128, 0, torch.device("cpu"))


@pytest.mark.filterwarnings("ignore:Every has 32")
@pytest.mark.parametrize(
    ("sampler", "num_data", "steps"),
    [
        (lambda d: None, 64, 4),
        (lambda d: SubsetRandomSampler(range(16)), 16, 1),
        (lambda d: list(range(16)), 16, 1),
        (lambda d: Every(64), 32, 2),
        (lambda d: Endless(64), 64, 4),
        (lambda d: WeightedRandomSampler(torch.ones(64), 300), 64, 19),
        (lambda d: WeightedRandomSampler([1.0] * 64, 20), 64, 2),
        (lambda d: WeightedRandomSampler([1.0, 0.0] * 32, 64), 32, 4),
        (lambda d: RandomSampler(d, replacement=True, num_samples=300), 64, 19),
        (lambda d: RandomSampler(d, num_samples=20), 64, 2),
        (lambda d: DistributedSampler(d, num_replicas=4, rank=0), 64, 1),
    ],
)
def test_the_data_set_is_what_the_sampler_draws_from(data, sampler, num_data, steps):
    rows = TensorDataset(*data)
    batches = make_batches(DataLoader(rows, 16, sampler=sampler(rows)), 128, 0, torch.device("cpu"))
    assert (batches.num_data, batches.steps) == (num_data, steps)


def test_a_sampler_of_some_rows_trains_as_a_subset_does(data):
    rows = TensorDataset(*data)
    expected = entry(DataLoader(Subset(rows, range(16)), 16), data)
    sampled = entry(DataLoader(rows, 16, sampler=SubsetRandomSampler(range(16))), data)
    assert sampled == pytest.approx(expected, rel=1e-5)


@pytest.mark.filterwarnings("ignore:all .* train labels are of class")  # the same row again and again
@pytest.mark.parametrize("batch_size", [10, 60])
def test_the_history_is_per_example_that_was_seen(data, batch_size):
    x, y = data[0][:1].expand(ROWS, -1), data[1][:1].expand(ROWS)
    rows = TensorDataset(x, y)
    expected = entry((x, y), data)
    for settings in (
        {},
        {"drop_last": True, "shuffle": True},
        {"sampler": WeightedRandomSampler(torch.ones(ROWS), 300)},
        {"sampler": RandomSampler(rows, replacement=True, num_samples=30)},
    ):
        assert entry(DataLoader(rows, batch_size, **settings), data) == pytest.approx(expected, rel=1e-4)


def test_a_run_resumed_in_the_middle_of_an_epoch_counts_its_rows_once(data, tmp_path):
    rows = TensorDataset(*data)

    def history(stop, **more):
        calls = []

        class Watched(MAP):
            def objective(self, *args):
                calls.append(1)
                if len(calls) == stop:
                    os.kill(os.getpid(), signal.SIGINT)
                return super().objective(*args)

        loader = DataLoader(rows, 10, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(0))
        return fit(Watched(make()), loader, data, epochs=2, progress=False, **more).history

    whole = history(0)
    with pytest.raises(Interrupted, match="epoch 1 of 2, step 3 of 6"):
        history(3, checkpoint=tmp_path / "run")
    for mine, theirs in zip(history(0, checkpoint=tmp_path / "run"), whole, strict=True):
        assert (mine["data"], mine["weights"]) == (theirs["data"], theirs["weights"])


def test_loaders_without_a_batch_size_of_their_own_are_refused_with_the_remedy(data):
    rows = TensorDataset(*data)
    grouped = DataLoader(rows, batch_sampler=BatchSampler(SequentialSampler(rows), 16, drop_last=False))
    with pytest.raises(
        StfsebError, match=r"batch_sampler.*give DataLoader\(\.\.\., batch_size=\.\.\., sampler=\.\.\.\)"
    ):
        entry(grouped, data)
    often = DataLoader(rows, 128, sampler=WeightedRandomSampler(torch.ones(ROWS), 300))
    with pytest.raises(StfsebError, match=r"batch_size=128 is more than the 64 rows that its sampler draws from"):
        entry(often, data)


@pytest.mark.parametrize("bad", [-100, -1, 7])
def test_a_label_that_cannot_be_is_named_in_whichever_minibatch_it_comes(data, bad):
    x, y = data[0], data[1].clone()
    y[-1] = bad
    loader = DataLoader(TensorDataset(x, y), 16)
    good = DataLoader(TensorDataset(*data), 16)
    for train, validation in ((loader, data), (good, loader)):
        with pytest.raises(StfsebError, match=rf"^label {bad} is outside the network's 3 classes \(0 to 2\)$"):
            fit(MCDropout(make(), samples=2), train, validation, epochs=1, progress=False)
