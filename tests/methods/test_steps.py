"""Which calls of an objective share a draw of the context, in every way in which people make their steps."""

import copy

import pytest
import torch
from torch import nn

from stfseb import STFSEB, Ensemble, StfsebError, fit
from stfseb.methods import steps

N, B = 96, 32


def made(context=None, dtype=torch.float32, rate=0.0, **settings):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(rate), nn.Linear(16, 3)).to(dtype)
    context = torch.rand(40, 8) if context is None else context
    return STFSEB(net, context, num_context=4, samples=1, prior_weight=1.0, **settings)


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(1)
    return torch.rand(N, 8, generator=generator), torch.randint(3, (N,), generator=generator)


def train(method, data, sizes, optimiser, batch_size=B):
    """Make steps of parts of these sizes; return which step of the context every part saw."""
    x, y = data
    seen = []
    for parts in sizes:
        optimiser.zero_grad()
        for part_x, part_y in zip(x[: sum(parts)].split(parts), y[: sum(parts)].split(parts), strict=True):
            method.objective(part_x, part_y, N, batch_size).total.backward()
            seen.append(method.context.step)
        optimiser.step()
    return seen


# What moves no weight: rounding in bfloat16, and a schedule that starts at zero.
STILL = {"bf16": (torch.bfloat16, 1e-9), "lr 0": (torch.float32, 0.0)}


@pytest.mark.parametrize("still", STILL)
def test_every_whole_step_has_its_own_draw_though_no_weight_moves(data, still):
    dtype, lr = STILL[still]
    method = made(dtype=dtype)
    optimiser = torch.optim.SGD(method.parameters(), lr=lr)
    assert train(method, data, [[B]] * 5, optimiser) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("still", STILL)
@pytest.mark.parametrize("several", [False, True])
def test_parts_share_a_draw_and_steps_do_not_though_no_weight_moves(data, still, several, monkeypatch):
    """With a smaller last step too, and in processes that have a share of the rows each."""
    monkeypatch.setattr(steps, "_several_processes", lambda: several)
    dtype, lr = STILL[still]
    method = made(dtype=dtype)
    optimiser = torch.optim.SGD(method.parameters(), lr=lr)
    assert train(method, data, [[8, 8], [8, 8], [4], [8, 8]], optimiser) == [1, 1, 2, 2, 3, 4, 4]


def test_rows_end_a_step_where_nothing_else_does(data):
    """An optimiser that skips a step (a gradient scaler's) leaves no sign, and the rows are used up."""
    x, y = data
    method = made()
    seen = []
    for _ in range(6):
        method.objective(x[:16], y[:16], N, B)
        seen.append(method.context.step)
    assert seen == [1, 1, 2, 2, 3, 3]


def test_processes_with_unequal_shares_stay_together(data, monkeypatch):
    """Where one process has more rows than the other they must not come to different steps."""
    monkeypatch.setattr(steps, "_several_processes", lambda: True)
    x, y = data
    drawn = []
    for share in (20, 12):
        method = made()
        for _ in range(3):  # all skipped by a scaler
            method.objective(x[:share], y[:share], N, B)
        drawn.append(method.context.step)
    assert drawn == [1, 1]


def test_an_update_by_hand_ends_a_step(data):
    x, y = data
    method = made()
    seen = []
    for _ in range(3):
        method.objective(x[:4], y[:4], N, B).total.backward()
        seen.append(method.context.step)
        with torch.no_grad():
            for parameter in method.parameters():
                parameter.sub_(0.1 * parameter.grad)
    assert seen == [1, 2, 3]


def test_the_optimiser_of_another_network_ends_nothing(data):
    x, y = data
    method, other = made(), made()
    optimisers = [torch.optim.SGD(m.parameters(), lr=0.0) for m in (method, other)]
    for both in (method, other):
        both.objective(x[:8], y[:8], N, B).total.backward()
    optimisers[1].step()
    for both in (method, other):
        both.objective(x[:8], y[:8], N, B)
    assert (method.context.step, other.context.step) == (1, 2)


def test_a_copy_goes_on_by_itself(data):
    x, y = data
    method = made()
    method.objective(x[:8], y[:8], N, B)
    twin = copy.deepcopy(method)
    optimiser = torch.optim.SGD(twin.parameters(), lr=0.1)
    assert train(twin, data, [[8, 8], [8, 8]], optimiser) == [1, 1, 2, 2]
    assert method.context.step == 1


def test_members_of_an_ensemble_have_steps_of_their_own(data):
    members = [made(), made()]
    ensemble = Ensemble([members[0], STFSEB(copy.deepcopy(members[1].net), torch.rand(40, 8), num_context=4)])
    optimiser = torch.optim.SGD(ensemble.parameters(), lr=0.0)
    x, y = data
    for _ in range(2):
        for _ in range(2):
            ensemble.objective(x[:8], y[:8], N, B).total.backward()
        optimiser.step()
    assert [member.context.step for member in ensemble.members] == [2, 2]


def test_calls_without_a_step_size_have_a_draw_each(data):
    x, y = data
    method = made()
    for expected in (1, 2, 3):
        method.objective(x[:8], y[:8], N)
        assert method.context.step == expected


def test_training_counts_one_draw_a_step(data):
    method = made()
    fit(method, data, epochs=2, batch_size=B, progress=False)
    assert method.context.step == 2 * N // B


# Rows of the minibatch as context ----------------------------------------------------------------


def test_rows_of_the_whole_step_are_the_context_of_its_parts(data):
    x, y = data
    method = made("train")
    method.reseed(0)
    expected = [method.objective(x[:B], y[:B], N).function, method.objective(x[-B:], y[-B:], N).function]
    method.reseed(0)
    for rows, whole in zip((slice(0, B), slice(N - B, N)), expected, strict=True):
        method.context.begin_parts(x[rows])
        parts = [method.objective(*part, N, B) for part in zip(x[rows].split(8), y[rows].split(8), strict=True)]
        torch.testing.assert_close(sum(part.function for part in parts), whole)
    assert method.context.step == 2


def test_parts_without_their_step_are_refused(data):
    x, y = data
    method = made("train")
    with pytest.raises(StfsebError, match=r"8 rows of a step of batch_size=32.*begin_parts") as caught:
        method.objective(x[:8], y[:8], N, B)
    assert "\n" not in str(caught.value)
    assert method.context.step == 0
    method.context.begin_parts(x[:B])
    for part in zip(x[:B].split(8), y[:B].split(8), strict=True):
        method.objective(*part, N, B)
    with pytest.raises(StfsebError, match="begin_parts"):  # those rows were of the step before
        method.objective(x[:8], y[:8], N, B)
    assert torch.isfinite(method.objective(x[:B], y[:B], N, B).total)  # a whole step needs nothing


def test_bytes_are_given_as_they_are(data):
    x = (255 * data[0]).byte()
    method = made("train")
    method.context.begin_parts(x[:B])
    method.objective(x[:8], data[1][:8], N, B)
    draw = method.context.draw(x[:8] / 255, 0)
    assert draw.images.dtype == torch.float32
    assert float(draw.images.max()) <= 1.0
