"""Make what README.md quotes and its picture, from a run each: `python docs/readme.py`; `--check` says what differs.

The picture is of `photos`: crops of pictures that scikit-image ships, in the public domain (NASA's) or CC0.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ppbench.records.store import Store
from ppbench.report.page.board import summary_of
from ppbench.report.page.profiles import labelled_png

ROOT = Path(__file__).resolve().parents[1]
README, PICTURE = ROOT / "README.md", ROOT / "docs" / "images" / "strip.png"
COMMAND = ["ppbench", "evaluate", "--defense", "spn", "--grid", "0.1", "--stage", "init", "--attack-batch", "1"]
PICTURES = [*COMMAND, "--dataset", "photos", "--victims", "8", "--seed", "1"]
PLACE = re.compile(r"(<!-- made by: python docs/readme\.py -->\n).*(<!-- /made -->)", re.DOTALL)
WIDTH = "100"
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
NEAR = 3.0
"""How far a quoted figure may be from today's, in its own unit: decibels and points differ between processors."""


def run(out: Path, command: Sequence[str] = COMMAND) -> str:
    """Return what a command prints, but for where its files are; they go to `out`."""
    environment = {**os.environ, "COLUMNS": WIDTH, "NO_COLOR": "1"}
    whole = [sys.executable, "-m", *command, "--workers", "1", "--out", str(out)]
    done = subprocess.run(whole, capture_output=True, text=True, env=environment, check=True)
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    apart = str(out), "--full prints", "The page and a wider screen"  # of other widths, places and forms
    return "\n".join(line for line in lines if not any(words in line for words in apart)).strip()


def quoted(text: str) -> str:
    """Return a run as README.md has it."""
    return f"```text\n$ {' '.join(COMMAND)}\n{text}\n```\n"


def drifted(before: str, after: str) -> bool:
    """Return whether two texts differ in words, or in a figure by more than `NEAR`; spaces and rules do not count."""
    old, new = (" ".join(text.split()) for text in (before, after))
    if re.sub(r"[\s─]+", "", NUMBER.sub("0", old)) != re.sub(r"[\s─]+", "", NUMBER.sub("0", new)):
        return True
    pairs = zip(NUMBER.findall(old), NUMBER.findall(new), strict=True)
    return any(abs(float(one) - float(other)) > NEAR for one, other in pairs)


def picture(out: Path) -> bytes:
    """Return the labelled strip of pictures of the results in `out`."""
    store = Store(out)
    return labelled_png(summary_of(store, "", store.images).pictures)


def main(words: list[str]) -> int:
    """Write README.md and the picture; with --check say what differs, and write nothing."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results"
        quote = quoted(run(out))
        before = README.read_text(encoding="utf-8")
        after = PLACE.sub(lambda match: match[1] + quote + match[2], before)
        if "--check" in words:
            if differs := drifted(before, after):
                print(f"README.md quotes another run; now it is:\n{quote}run python docs/readme.py", file=sys.stderr)
            return int(differs)
        README.write_text(after, encoding="utf-8")
        run(shots := Path(folder) / "pictures", PICTURES)
        PICTURE.write_bytes(picture(shots))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
