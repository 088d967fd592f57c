"""`fit`: the protocol, its determinism, and what it does when things go wrong."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stfseb import MAP, STFSEB, MCDropout, StfsebError, fit
from stfseb.training import batches
from stfseb.training.batches import ResidentBatches, split_off
from stfseb.training.engine import EagerEngine, make_optimiser
from stfseb.training.fit import CollapseWarning, DivergedError
from stfseb.training.loop import FitResult
from stfseb.training.validation import validation_score


def make_net(rate=0.5):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Dropout(rate), nn.Linear(32, 2))


@pytest.fixture(scope="module")
def moons():
    """Two classes a line apart, 300 to train and 100 to validate."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(400, 2, generator=g)
    y = (x[:, 0] + 0.5 * x[:, 1] > 0).long()
    return (x[:300], y[:300]), (x[300:], y[300:])


def run(moons, method=None, **settings):
    method = method or MCDropout(make_net(), samples=3)
    settings = {"epochs": 3, "batch_size": 64, "lr": 1e-2, "progress": False, **settings}
    return method, fit(method, *moons, **settings)


def weights(method):
    return torch.cat([p.detach().flatten() for p in method.net.parameters()])


def test_learns_and_reports(moons):
    method, result = run(moons, epochs=20)
    assert result.history[-1]["validation_accuracy"] > 0.9
    assert result.history[-1]["data"] < result.history[0]["data"] / 2
    assert [e["epoch"] for e in result.history] == list(range(1, len(result.history) + 1))
    assert not method.training
    assert "best epoch" in str(result)


def test_the_same_seed_gives_the_same_model_and_leaves_the_random_state_alone(moons):
    state = torch.get_rng_state()
    a, _ = run(moons, MCDropout(make_net(), samples=3))
    torch.set_rng_state(state)
    torch.rand(7)  # what the caller draws does not matter
    before = torch.get_rng_state()
    net = make_net()
    method = MCDropout(net, samples=3)
    torch.set_rng_state(before)
    b, _ = run(moons, method)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(weights(a), weights(b))
    c, _ = run(moons, MCDropout(make_net(), samples=3), seed=1)
    assert not torch.equal(weights(a), weights(c))


def test_the_best_epoch_is_restored(moons):
    """With a huge learning rate late epochs are worse; the weights that stay are the best epoch's."""
    method, result = run(moons, lr=0.3, epochs=12, patience=12)
    scores = [e["validation_nll"] for e in result.history]
    assert result.best_epoch == int(np.argmin(scores)) + 1
    assert scores[-1] > min(scores)
    again = validation_score(method, [moons[1]], method.samples)
    assert again.nll == pytest.approx(min(scores), rel=1e-6)


def test_patience_stops(moons):
    _, result = run(moons, lr=1.0, epochs=60, patience=3)
    assert result.stopped == "patience"
    assert len(result.history) == result.best_epoch + 3


def test_the_validation_score_is_of_the_averaged_probability(moons):
    method = MCDropout(make_net(), samples=3)
    x, y = moons[1]
    torch.manual_seed(0)
    one = validation_score(method, [(x, y)], 5)
    torch.manual_seed(1)
    two = validation_score(method, [(x[:30], y[:30]), (x[30:], y[30:])], 5)
    assert one == pytest.approx(two, rel=1e-6)  # fixed masks: no noise from run to run, or from grouping
    from stfseb.training.validation import _SEED

    p = method.sample_logits(x, 5, seed=_SEED).softmax(-1).mean(0)
    assert one.nll == pytest.approx(-p[torch.arange(len(y)), y].log().mean().item(), rel=1e-5)


def test_a_ragged_last_batch_weighs_what_it_holds(moons):
    """The epoch's gradient, summed over minibatches at fixed weights, is the full objective's."""
    net = make_net(0.0)
    method = MAP(net, sigma=0.5)
    (x, y), _ = moons
    parts = [0.0, 0.0]
    batches = ResidentBatches(x, y, 128, 0, torch.device("cpu"))
    sizes = []
    for xb, yb in batches.epoch(1):
        sizes.append(len(xb))
        terms = method.objective(xb, yb, batches.num_data)
        parts = [parts[0] + terms.data.item(), parts[1] + terms.weights.item()]
    assert sizes == [128, 128, 44]
    whole = method.objective(x, y, len(x))
    assert parts == pytest.approx([whole.data.item(), whole.weights.item()], rel=1e-5)


def test_every_batch_is_divided_by_the_nominal_size(moons):
    net = make_net(0.0)
    (x, y), _ = moons
    method = MAP(net, sigma=0.5)
    batches = ResidentBatches(x, y, 128, 0, torch.device("cpu"))
    EagerEngine(method, batches, make_optimiser(method, lr=0.0), "float32").step(x[:44], y[:44])
    found = torch.cat([p.grad.flatten() for p in net.parameters()])
    total = method.objective(x[:44], y[:44], len(x)).total / 128
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(total, list(net.parameters()))])
    assert torch.allclose(found, expected, atol=1e-7)


def test_loaders_of_other_kinds_are_refused_in_one_line(moons):
    (x, y), validation = moons
    method = MCDropout(make_net(), samples=1)

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(zip(x, y, strict=True))

    for train, match in (
        (DataLoader(TensorDataset(x[:5], y[:5]), batch_size=8, drop_last=True), "no minibatch"),
        (DataLoader(TensorDataset(x, y, y), batch_size=8), "pairs"),
        (Stream(), "IterableDataset"),
        ((), "pair"),
    ):
        with pytest.raises(StfsebError, match=match):
            fit(method, train, validation, epochs=1, progress=False)
    with pytest.raises(StfsebError, match="validation x is empty"):
        fit(method, (x, y), (x[:0], y[:0]), epochs=1, progress=False)
    with pytest.raises(StfsebError, match="validation x of shape"):
        fit(method, (x, y), (x[:, :1], y), epochs=1, progress=False)

    class Empty(torch.utils.data.Dataset):
        def __len__(self):
            return 0

    for nothing in (Empty(), DataLoader(Empty(), 8)):
        with pytest.raises(StfsebError, match="validation is empty"):
            fit(method, (x, y), nothing, epochs=1, progress=False)
    with pytest.raises(StfsebError, match="no length"):
        fit(method, (x, y), torch.utils.data.Dataset(), epochs=1, progress=False)

    class Named(TensorDataset):
        def __getitem__(self, index):
            return {"x": x[index], "y": y[index]}

    with pytest.raises(StfsebError, match="not dict"):
        fit(method, DataLoader(Named(x, y), 8), validation, epochs=1, progress=False)
    loader = DataLoader(TensorDataset(x, y.int()), batch_size=50, shuffle=True)
    state = torch.get_rng_state()
    fit(method, loader, validation, epochs=1, progress=False)
    assert torch.equal(state, torch.get_rng_state())


def test_streamed_minibatches_are_augmented_too(moons):
    (x, y), validation = moons
    found = []
    for train, augment in (((x, y), lambda x: x + 1), ((x + 1, y), None), ((x, y), None)):
        loader = DataLoader(TensorDataset(*train), batch_size=64)
        method = MCDropout(make_net(), samples=2)
        found.append(fit(method, loader, validation, epochs=1, augment=augment, progress=False).best_validation_nll)
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[0] != pytest.approx(found[2], rel=1e-3)


def test_data_that_do_not_fit_are_streamed(moons, monkeypatch, caplog, tmp_path):
    """The same run, to the digit, and the same checkpoint's; the log says it."""
    found = []
    for room in (True, False):
        monkeypatch.setattr(batches, "fits", lambda pair, device, room=room: room)
        method, result = run(moons, augment=lambda x: x + 0.1, epochs=3)
        found.append((weights(method), result.best_validation_nll))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-6)
    assert "train does not fit into the memory of cpu" in caplog.text
    for room in (False, True):
        monkeypatch.setattr(batches, "fits", lambda pair, device, room=room: room)
        run(moons, checkpoint=tmp_path / "run")


@pytest.mark.gpu
def test_streamed_data_train_on_the_card(moons, monkeypatch):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    assert batches.fits(moons[0], torch.device("cuda"))
    monkeypatch.setattr(batches, "_ROOM", 0.0)
    _, result = run(moons, epochs=20, device="cuda")
    assert "the data are streamed" in result.engine
    assert result.history[-1]["validation_accuracy"] > 0.9


def test_without_pinned_memory_a_minibatch_is_sent_all_the_same(monkeypatch):
    def refuse(part):
        raise RuntimeError("CUDA error: out of memory")

    moved = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    monkeypatch.setattr(torch.Tensor, "to", lambda part, device, non_blocking: moved.append((device, part)) or part)
    x = torch.rand(3)
    assert batches.sent(x, torch.device("cuda")) is x
    assert moved[0][0] == torch.device("cuda")


@pytest.mark.gpu
def test_a_minibatch_is_sent_while_the_card_is_busy():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    x = torch.rand(1 << 22)
    batches.sent(x, torch.device("cuda"))  # the first makes the memory that later ones use again
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second of nothing
    done = torch.cuda.Event()
    done.record()
    there = batches.sent(x, torch.device("cuda"))
    assert not done.query(), "the host has waited for the card"
    assert torch.equal(there.cpu(), x)


def test_one_row_left_over_and_batch_norm():
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    x, y = torch.rand(65, 2), torch.arange(65) % 2
    with pytest.raises(StfsebError, match="batch_size"):
        fit(MAP(net), (x, y), (x, y), epochs=1, batch_size=32, progress=False)


def test_one_step_of_adam_by_hand(moons):
    """`fit` with one full batch is Adam's first step on total / B."""
    (x, y), validation = moons
    net = make_net(0.0)
    start = weights(MAP(net)).clone()
    gradient = torch.autograd.grad(MAP(net).objective(x, y, len(x)).total / len(x), list(net.parameters()))
    g = torch.cat([v.flatten() for v in gradient])
    method = MAP(net)
    fit(method, (x, y), validation, epochs=1, batch_size=len(x), lr=1e-3, progress=False)
    step = 1e-3 * g / (g.abs() + 1e-8)
    assert torch.allclose(weights(method), start - step, atol=2e-6)


@pytest.mark.parametrize("kind", ["tensors", "arrays", "dataset", "loader", "bytes"])
def test_all_kinds_of_data(kind, mini):
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.Dropout(0.5), nn.Linear(16, 10))
    images = mini("train", 60)
    x, y = images.images / 255, images.labels

    class Own(torch.utils.data.Dataset):
        def __len__(self):
            return 60

        def __getitem__(self, i):
            return x[i], int(y[i])

    train = {
        "tensors": (x, y),
        "arrays": (x.numpy(), y.numpy()),
        "dataset": Own(),
        "loader": DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True),
        "bytes": images,
    }[kind]
    validation = None if kind != "loader" else (x, y)
    result = fit(MCDropout(net, samples=2), train, validation, epochs=2, batch_size=16, progress=False)
    assert len(result.history) == 2


def test_a_tenth_is_held_out_the_same_for_every_seed(moons):
    (x, y), _ = moons
    (xt, _), (xv, _) = split_off((x, y), 0.1)
    assert (len(xt), len(xv)) == (270, 30)
    again = split_off((x, y), 0.1)[1][0]
    assert torch.equal(xv, again)
    rows = {tuple(r) for r in x.tolist()}
    assert {tuple(r) for r in xt.tolist()} | {tuple(r) for r in xv.tolist()} == rows


def test_collapse_is_warned_of(moons):
    method = MAP(make_net(0.0), sigma=1e-4)
    with pytest.warns(CollapseWarning, match="constant predictor"):
        _, result = run(moons, method, epochs=6, lr=0.05)
    assert result.collapsed


def test_nan_is_stopped_with_the_term_and_the_settings(moons):
    class Broken(nn.Sequential):
        def forward(self, x):
            return super().forward(x) * math.inf

    net = Broken(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    with pytest.raises(DivergedError, match=r"data term became nan in epoch 1 of MC Dropout \(sigma=0.5") as caught:
        run(moons, MCDropout(net, sigma=0.5))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("train", "match"),
    [
        ((torch.zeros(0, 2), torch.zeros(0, dtype=torch.long)), "empty"),
        ((torch.full((5, 2), math.nan), torch.zeros(5, dtype=torch.long)), "NaN"),
        ((torch.zeros(5, 2), torch.full((5,), 2)), "label 2 is outside the network's 2 classes"),
        ((torch.zeros(5, 2), torch.full((5,), -1)), "label -1"),
        ((torch.zeros(5, 2), torch.zeros(5)), "labels must be integers"),
        ((torch.zeros(5, 2), torch.zeros(4, dtype=torch.long)), "5 examples but 4 labels"),
        ((torch.zeros(5, 3), torch.zeros(5, dtype=torch.long)), "does not fit the network"),
        ((torch.zeros(5, 2), None), "without labels"),
        (7, "train is a int"),
        (torch.zeros(5, 2), r"train is a Tensor: give \(x, y\)"),
        ("photos", "^train='photos' is a name, not data: give .*Dataset.*load_task"),
        (Path("photos"), "^train='photos' is a name"),
    ],
)
def test_bad_data_is_named(moons, train, match):
    with pytest.raises(StfsebError, match=match) as caught:
        fit(MCDropout(make_net()), train, moons[1], progress=False)
    assert "\n" not in str(caught.value)
    with pytest.raises(StfsebError, match=match):  # and where a part of it is to be held out
        fit(MCDropout(make_net()), train, progress=False)


def test_a_result_counts_its_epochs():
    said = [str(FitResult(history=[{}] * count, seconds=24.0, stopped="epochs")) for count in (1, 2)]
    assert [text.partition(" (")[0] for text in said] == ["1 epoch in 24 s", "2 epochs in 24 s"]


def test_too_few_to_hold_out_are_counted():
    with pytest.raises(StfsebError, match=r"^train has 1 example: too few to hold out 10%"):
        fit(MCDropout(make_net()), (torch.zeros(1, 2), torch.zeros(1, dtype=torch.long)), progress=False)


def test_bad_arguments_are_named(moons):
    for settings, match in (({"epochs": 0}, "epochs=0"), ({"lr": -1.0}, "lr=-1.0"), ({"patience": 0}, "patience=0")):
        with pytest.raises(StfsebError, match=match):
            run(moons, **settings)
    with pytest.raises(StfsebError, match="validation is missing"):
        fit(MCDropout(make_net()), DataLoader(TensorDataset(*moons[0]), batch_size=4), progress=False)


def test_batch_norm_takes_its_statistics_from_data_rows_only(resnet, mini):
    """The running statistics after one objective do not depend on the context."""
    torch.manual_seed(0)
    net = resnet(rate=0.0)
    start = {k: v.clone() for k, v in net.state_dict().items()}
    data = mini("train", 16)
    found = []
    for context in (mini("kmnist", 40).images, 255 - mini("mnist", 40).images):
        net.load_state_dict(start)
        method = STFSEB(net, context, samples=1, prior_weight=1.0).train()
        terms = method.objective(data.images, data.labels, 100)
        assert torch.isfinite(terms.total)
        found.append({k: v.clone() for k, v in net.state_dict().items()})
    assert all(torch.equal(found[0][k], found[1][k]) for k in found[0])
    assert not torch.equal(found[0]["stem.1.running_mean"], start["stem.1.running_mean"])
    net.load_state_dict(start)
    net.train()(data.images / 255)
    assert torch.allclose(net.stem[1].running_mean, found[0]["stem.1.running_mean"], atol=1e-6)


def test_progress_without_a_terminal_is_a_line_an_epoch(moons, capsys):
    run(moons, progress=True, epochs=2)
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 2
    assert "data" in lines[0]
    assert "validation NLL" in lines[0]


def test_settings_of_a_captured_step_do_not_outlive_it(moons):
    """They lie on the card, and the method may be moved and trained elsewhere."""
    method = MCDropout(make_net(), samples=1)
    run(moons, method, epochs=1, callback=lambda _: method.make_live(method.like))  # as capturing does
    assert method.live == {}


def test_callback_sees_every_epoch(moons):
    seen = []
    run(moons, callback=seen.append)
    assert [e["epoch"] for e in seen] == [1, 2, 3]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"seed": None}, "seed=None: must be a whole number"),
        ({"seed": 1.5}, "seed=1.5: must be a whole number"),
        ({"betas": (1.0, 2.0)}, r"betas=\(1.0, 2.0\): give two numbers of at least 0 and below 1"),
        ({"betas": 0.9}, "betas=0.9: give two numbers"),
        ({"eps": -1}, "eps=-1: must be a number of at least 0"),
        ({"device": "gpu"}, "device='gpu': give 'cpu', 'cuda' or 'cuda:0'"),
        ({"device": 1.5}, "device=1.5: give 'cpu', 'cuda' or 'cuda:0'"),
        ({"device": "cuda:99"}, "device='cuda:99': torch finds"),
        ({"validation_samples": 0}, "validation_samples=0: must be a whole number of at least 1"),
        ({"validation_samples": 2.5}, "validation_samples=2.5: must be"),
    ],
)
def test_arguments_that_cannot_be_are_named(moons, settings, named):
    (x, y), validation = moons
    with pytest.raises(StfsebError, match=f"^{named}"):
        fit(MCDropout(make_net(), samples=1), (x, y), validation, epochs=1, progress=False, **settings)
