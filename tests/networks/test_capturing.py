"""A capture that fails leaves torch as it was; torch's own context manager does not (seen in its 2.11 and 2.13)."""

import gc
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from stfseb.networks import capturing as capturing_module
from stfseb.networks.capturing import capturing

CARD = torch.device("cuda", 0)


class Card:
    """What of torch.cuda a capture touches, with the order in which torch 2.11 ends one."""

    def __init__(self, breaks):
        self.breaks = breaks
        self.stream, self.pools, self.released, self.cleared = "mine", [], [], 0
        self.generator = "default state"
        self.seen = {}

    def graphsafe_get_state(self):
        return self.generator

    def graphsafe_set_state(self, state):
        self.generator = state

    def graph(self, graph, pool, stream):
        card = self

        class Context:
            def __enter__(self):
                card.stream = stream
                card.pools.append(pool)

            def __exit__(self, *error):
                if card.breaks:
                    raise RuntimeError("operation failed due to a previous error during capture")
                card.pools.remove(pool)
                card.stream = "mine"

        return Context()

    def end(self, place, pool):
        if pool not in self.pools:
            raise RuntimeError("not currently recording to mempool_id")
        self.pools.remove(pool)

    def clear(self):
        self.cleared += 1


@pytest.fixture
def card(monkeypatch):
    def make(breaks):
        made = Card(breaks)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.stream)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(made, "stream", stream))
        monkeypatch.setattr(torch.cuda, "default_generators", [made])
        monkeypatch.setattr(torch.cuda, "graph", made.graph)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(torch, "Generator", lambda device: SimpleNamespace(graphsafe_get_state=lambda: "new state"))
        for name, value in {
            "_cuda_endAllocateToPool": made.end,
            "_cuda_releasePool": lambda place, pool: made.released.append(pool),
            "_cuda_clearCublasWorkspaces": made.clear,
        }.items():
            monkeypatch.setattr(torch._C, name, value, raising=False)
        monkeypatch.setattr(capturing_module, "_failed", [])
        return made

    return make


def capture(card, error=None, **how):
    with capturing("graph", CARD, "side", **how):
        card.seen = {"stream": card.stream, "generator": card.generator, "gc": gc.isenabled(), "cleared": card.cleared}
        if error is not None:
            raise error


def clean(card):
    return card.stream == "mine" and card.generator == "default state" and gc.isenabled() and not card.pools


def test_a_capture_has_its_own_stream_generator_and_workspace(card):
    made = card(breaks=False)
    capture(made)
    assert made.seen == {"stream": "side", "generator": "new state", "gc": False, "cleared": 1}
    assert made.cleared == 2
    assert clean(made)
    assert not made.released
    own = SimpleNamespace(graphsafe_get_state=lambda: "own state")
    capture(made, generator=own)
    assert made.seen["generator"] == "own state"


def test_a_failed_capture_leaves_no_trace(card):
    """The error in the block invalidates the capture, whose end then fails before it has tidied up."""
    made = card(breaks=True)
    with pytest.raises(RuntimeError, match="previous error"):
        capture(made, RuntimeError("not permitted when stream is capturing"))
    assert clean(made)
    assert made.released == [(0, 7)]
    assert capturing_module._failed == ["graph"]


def test_an_error_that_is_none_of_the_captures_ends_it_once(card):
    made = card(breaks=False)
    with pytest.raises(KeyError):
        capture(made, KeyError("a user's"), pool=(3, 0))
    assert clean(made)
    assert not made.released
    assert not capturing_module._failed
