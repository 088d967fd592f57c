"""SIGTERM and Ctrl-C: the step under way is finished, the run is saved, and an error says how to go on."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from stfseb.errors import StfsebError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(StfsebError):  # noqa: N818  (nothing has gone wrong)
    """Training was asked to stop; the message says what was saved and how to go on.

    Args:
        signum: the signal that asked.
        where: how far training had come.
        remedy: what was saved, and how to go on.
    """

    def __init__(self, signum: int, where: str, remedy: str) -> None:
        self.signum, self.where, self.remedy = signum, where, remedy
        name = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
        super().__init__(f"stopped by {name} {where}: {remedy}")

    @property
    def exit_code(self) -> int:
        """Return what a shell expects of a program that a signal has ended: 130 or 143."""
        return 128 + self.signum

    def with_remedy(self, remedy: str) -> Interrupted:
        """Return the same with other words on how to go on."""
        return Interrupted(self.signum, self.where, remedy)

    def __reduce__(self) -> tuple[Any, ...]:
        """Survive the way from one process to another, which calls the constructor again."""
        return Interrupted, (self.signum, self.where, self.remedy)


@contextmanager
def stoppable(where: Callable[[], str], remedy: str | Callable[[], str]) -> Iterator[None]:
    """Turn SIGTERM and Ctrl-C within the block into `Interrupted`, with these words.

    On its way out of the block it is a KeyboardInterrupt: no code takes it for an error of its own. Handlers are
    installed as those of `Interrupts` are.

    Args:
        where: says how far the work has come.
        remedy: what was saved, and how to go on; a function where that is known at the end alone.
    """
    caught: list[int] = []

    def stop(signum: int, frame: FrameType | None) -> None:
        del frame
        caught.append(signum)
        raise KeyboardInterrupt

    former = {}
    if threading.current_thread() is threading.main_thread():
        former = {signum: signal.getsignal(signum) for signum in SIGNALS}
        former = {signum: handler for signum, handler in former.items() if handler not in (signal.SIG_IGN, None)}
        for signum in former:
            signal.signal(signum, stop)
    try:
        yield
    except KeyboardInterrupt:
        if not caught:
            raise
        raise Interrupted(caught[0], where(), remedy if isinstance(remedy, str) else remedy()) from None
    finally:
        for signum, handler in former.items():
            signal.signal(signum, handler)


class Interrupts:
    """While entered, the first SIGTERM or Ctrl-C is only remembered in `caught`; a second one ends at once.

    Handlers are installed in the main thread only (Python allows no other), not for signals that are being
    ignored (as under nohup), and put back on leaving.
    """

    def __init__(self) -> None:
        self.caught: int | None = None
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for signum in SIGNALS:
                former = signal.getsignal(signum)
                if former is not signal.SIG_IGN and former is not None:  # None: not installed from Python
                    self._former[signum] = former
                    signal.signal(signum, self._remember)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._former:
            signal.signal(*self._former.popitem())

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        del frame
        if self.caught is None:
            self.caught = signum
            return
        if signum == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + signum)
