"""SQLite and PostgreSQL behind a URL: opening, locking, and errors in one line without the password."""

from __future__ import annotations

import hashlib
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stfseb.errors import StfsebError

if TYPE_CHECKING:
    from collections.abc import Iterator


def open_url(url: str) -> tuple[str, dict[str, Any]]:
    """Return the storage's URL as sqlalchemy takes it, with the engine's arguments; refuse what has no lock."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        raise StfsebError(f"storage '{url}' is not a URL: write sqlite:///FILE or postgresql://USER@HOST/DATABASE")
    if scheme in ("postgresql", "postgres", "postgresql+psycopg"):
        engine = {"pool_pre_ping": True, "connect_args": {"connect_timeout": 10}}
        return f"postgresql+psycopg://{rest}", engine
    if scheme != "sqlite" or not rest.strip("/") or ":memory:" in rest:
        raise StfsebError(f"storage '{scheme}' cannot be used: give sqlite:///FILE or postgresql://USER@HOST/DATABASE")
    file = Path(rest[1:])
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StfsebError(f"cannot write to {file.parent}: {error.strerror or error}; choose another --out") from error
    return url, {"connect_args": {"timeout": 60}}


def shown_url(url: str) -> str:
    """Return a URL without its password."""
    scheme, mark, rest = url.partition("://")
    login, at, place = rest.rpartition("@")
    return f"{scheme}{mark}{login.partition(':')[0]}{at}{place}" if at else url


@contextmanager
def readable(url: str) -> Iterator[None]:
    """Turn what a storage can say into one line, without the password."""
    import optuna
    import sqlalchemy

    try:
        yield
    except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        cause = error.__cause__ or error
        text = str(getattr(cause, "orig", None) or cause).strip().splitlines()[0]
        password = shown_url(url) != url and url.rpartition("@")[0].rpartition(":")[2]
        if password:
            text = text.replace(password, "***")
        raise StfsebError(
            f"the storage {shown_url(url)} cannot be used: {text}; check that it runs and that the URL is right, "
            "then start the same command again"
        ) from None
    except ImportError as error:
        raise StfsebError(f"PostgreSQL needs psycopg ({error}): pip install 'stfseb[postgres]'") from None


@contextmanager
def hushed() -> Iterator[None]:
    """Hush optuna's remarks that heartbeats are experimental and meant for its own loop."""
    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        warnings.filterwarnings("ignore", message=".*Heartbeat of storage.*")
        yield


class Lock:
    """`with lock():` holds the study against all other workers and threads."""

    def __init__(self, url: str, name: str, engine: dict[str, Any]) -> None:
        import sqlalchemy

        self.url = url
        self.engine = None
        if url.startswith("sqlite"):
            self.file = Path(f"{url.removeprefix('sqlite:///')}.lock")
            return
        self.key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)
        with readable(url):
            self.engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.pool.NullPool, **_no_pool(engine))

    def close(self) -> None:
        """Close the connections."""
        if self.engine is not None:
            self.engine.dispose()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Hold the lock for a block."""
        if self.engine is None:
            import fcntl

            try:
                file = self.file.open("w")
            except OSError as error:
                raise StfsebError(f"cannot write {self.file}: {error.strerror or error}") from error
            with file:
                fcntl.flock(file, fcntl.LOCK_EX)
                yield
            return
        import sqlalchemy

        with readable(self.url):
            connection = self.engine.connect()
        with connection:
            with readable(self.url):
                connection.execute(sqlalchemy.text("select pg_advisory_xact_lock(:key)"), {"key": self.key})
            yield


def _no_pool(engine: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in engine.items() if not name.startswith("pool_")}
