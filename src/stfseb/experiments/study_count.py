"""How many trials of a study are finished, read beside its workers: no lock is taken and nothing is written.

SQLite's own readers take a lock that makes a writer wait. Here the file is read as if nobody wrote to it
(`immutable`), and what was read counts only if nobody did: no journal lay beside it before or after, and the counter
of changes in the file's header is the same. Otherwise it is read again.
"""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from typing import TYPE_CHECKING
from urllib.parse import quote

if TYPE_CHECKING:
    from pathlib import Path

_TRIES, _PAUSE = 40, 0.025  # a worker's write lasts some milliseconds
_COUNT = """
select count(distinct drawn.value_json),
       count(distinct case when trials.state in ('COMPLETE', 'PRUNED', 'FAIL') and exists (
           select 1 from trial_user_attributes as result
           where result.trial_id = trials.trial_id and result.key = 'result') then drawn.value_json end)
from studies
join trials on trials.study_id = studies.study_id
join trial_user_attributes as drawn on drawn.trial_id = trials.trial_id and drawn.key = 'index'
where studies.study_name = ?
"""


def count_trials(database: Path, study: str) -> tuple[int, int] | None:
    """Return how many trials of a study in an SQLite file are finished, and how many are asked for.

    None where there is no such file or study, or where no moment without a writer was found (one that died in the
    middle of a write leaves its journal until the next worker comes).
    """
    for turn in range(_TRIES):
        if turn:
            time.sleep(_PAUSE)
        before = _unchanging(database)
        if before is None:
            if not database.is_file():
                return None
            continue
        try:
            with closing(sqlite3.connect(f"file:{quote(str(database.resolve()))}?immutable=1", uri=True)) as opened:
                asked, finished = opened.execute(_COUNT, (study,)).fetchone()
        except sqlite3.Error:  # half of somebody's write, or a study that is being made
            continue
        if _unchanging(database) == before:
            return (int(finished), int(asked)) if asked else None
    return None


def _unchanging(database: Path) -> bytes | None:
    """Return the file's counter of changes, None while somebody writes or where it cannot be read."""
    if database.with_name(f"{database.name}-journal").exists():
        return None
    try:
        with database.open("rb") as file:
            return file.read(100)[24:28] or None  # of the header, as SQLite's file format has it
    except OSError:
        return None
