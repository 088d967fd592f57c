"""Write docs/results.md, its pictures and docs/tables from the runs and searches in results/: `make results`.

    python scripts/make_results.py [--results results] [--page docs/results.md] [--check]

Only what stands between `<!-- generated: NAME -->` and `<!-- end -->` is written; words outside are left alone.
Running it twice changes nothing. --check writes nothing, names what is out of date and ends with 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from PIL import Image

from stfseb.errors import StfsebError
from stfseb.files import write_bytes, write_text
from stfseb.report.results_page import ResultsPage, filled, results_page, rounded
from stfseb.report.style import rendered

ROOT = Path(__file__).resolve().parents[1]


def texts(made: ResultsPage, page: Path) -> dict[Path, str]:
    """Return the files that are text, with what they should hold."""
    found = {page: filled(page.read_text("utf-8"), made.blocks, page.name)}
    for name, grid in made.tables.items():
        data = json.dumps(rounded(grid.to_json()), indent=1, ensure_ascii=False, allow_nan=False)
        found[page.parent / "tables" / f"{name}.json"] = data + "\n"
    return found


def description(path: Path) -> str:
    """Return what a picture says was drawn in it."""
    if not path.exists():
        return ""
    with Image.open(path) as image:
        return str(image.info.get("Description", ""))


def stale(made: ResultsPage, page: Path) -> list[Path]:
    """Return the files that are not as the records would have them; tables that no record has are among them."""
    wanted = texts(made, page)
    out = [path for path, text in wanted.items() if not path.exists() or path.read_text("utf-8") != text]
    out += sorted(path for path in (page.parent / "tables").glob("*.json") if path not in wanted)
    images = page.parent / "images"
    return out + [
        images / f"{n}.png" for n, p in made.pictures.items() if description(images / f"{n}.png") != p.fingerprint
    ]


def write(made: ResultsPage, page: Path) -> list[Path]:
    """Write what is out of date, and return it."""
    wanted, changed = texts(made, page), stale(made, page)
    for path in changed:
        if path in wanted:
            write_text(path, wanted[path])
        elif path.suffix != ".png":
            path.unlink()
    for name, picture in made.pictures.items():
        path, figure = page.parent / "images" / f"{name}.png", picture.draw()
        assert figure is not None
        content = rendered(figure, "png", picture.fingerprint)
        if not path.exists() or path.read_bytes() != content:
            write_bytes(path, content)
            changed = [*dict.fromkeys([*changed, path])]
    return changed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "results.md")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    try:
        if not any((given.results / name).is_dir() for name in ("runs", "searches")):  # the page would be emptied
            raise StfsebError(f"{given.results} holds neither runs nor searches: give a folder of results")
        made = results_page(given.results)
        changed = (stale if given.check else write)(made, given.page)
    except StfsebError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for path in changed:
        print(f"{'out of date' if given.check else 'written'}: {path}")
    if not changed:
        print(f"{given.page} and what belongs to it are up to date")
    return 1 if given.check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
