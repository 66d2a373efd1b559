"""Derive the tables of the committed boards again from their records: after a change of columns, or of ranks.

Run: python benchmarks/rederive_boards.py [NAME ...]        (of leaderboards/results; all by default)
leaderboard.csv and worst_case.csv alone change, in the archive and beside it, the archive's digest in its manifest, and
origin.json, which gets the manifest's command.
Records are not touched. What changed is printed; the exit code is 1 where a board has problems that tables do not heal.
"""

from __future__ import annotations

import hashlib
import re
import sys
import tempfile
from pathlib import Path

from ppbench.base.toml_files import tomllib
from ppbench.claims.check import claimed
from ppbench.records.archive import pack_archive, unpack_archive
from ppbench.records.run_files import restate, soundness_of
from ppbench.records.store import Store
from ppbench.report.controls import check_harness
from ppbench.report.frame import frame_of
from ppbench.report.page.boards import boards_of, csv_text, worst_csv
from ppbench.verification import verify

RESULTS = Path(__file__).parents[1] / "leaderboards" / "results"
WORST = "worst_case.csv"


def write_tables(folder: Path) -> None:
    """Write both tables of a folder of results from its records."""
    store = Store(folder)
    records = frame_of(store.load_all())
    ranked = boards_of(records, claimed, check_harness(soundness_of(store)).ok is not False)
    (folder / WORST).write_text(worst_csv(ranked), encoding="utf-8", newline="")
    store.csv_path.write_text(csv_text(records, claimed, ranked), encoding="utf-8", newline="")


def rederive(board: Path) -> bool:
    """Write the tables of a committed board anew; return whether anything changed."""
    archive, manifest = board / "records.zip", board / "manifest.toml"
    if not archive.is_file():
        tables = [board / "baseline" / name for name in ("leaderboard.csv", WORST)]
        before = [path.read_bytes() for path in tables]
        write_tables(board / "baseline")
        return before != [path.read_bytes() for path in tables]
    before = archive.read_bytes()
    with tempfile.TemporaryDirectory() as made:
        folder, packed = Path(made) / "board", Path(made) / "records.zip"
        if problems := unpack_archive(archive, folder):
            raise SystemExit(problems[0])
        write_tables(folder)
        restate(folder, tomllib.loads(manifest.read_text())["command"])
        pack_archive(folder, packed)
        archive.write_bytes(packed.read_bytes())
        (board / WORST).write_bytes((folder / WORST).read_bytes())
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    page = re.sub(r'(?m)^archive_sha256 = "\w*"$', f'archive_sha256 = "{digest}"', manifest.read_text())
    manifest.write_text(page)
    return before != archive.read_bytes()


def main(names: list[str]) -> int:
    """Derive the tables of the named boards, or of all, and verify them."""
    wrong = 0
    for board in sorted(path.parent for path in RESULTS.glob("*/manifest.toml")):
        if names and board.name not in names:
            continue
        changed = rederive(board)
        problems = verify(board / ("records.zip" if (board / "records.zip").is_file() else "baseline"), claimed)
        print(f"{board.name}: {'written again' if changed else 'as it was'}", *problems[:3], sep="; ")
        wrong += bool(problems)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
