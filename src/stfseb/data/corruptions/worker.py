"""A process that makes corruptions: one JSON job a line in, `true` or an error message a line out."""

from __future__ import annotations

import json
import sys
from contextlib import suppress

from stfseb.data.corruptions.generate import run


def main() -> None:
    """Answer jobs until there are no more."""
    for line in sys.stdin:
        try:
            run(json.loads(line))
            answer: bool | str = True
        except Exception as fault:  # whatever it is, the parent tells the user
            answer = " ".join(f"{fault}".split()) or type(fault).__name__
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):  # the parent was interrupted too, and says so
        main()
