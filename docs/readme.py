"""Make what README.md quotes, and its picture, from a run: `python docs/readme.py`; `--check` says what differs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README, PICTURE = ROOT / "README.md", ROOT / "docs" / "images" / "strip.png"
COMMAND = ["ppbench", "evaluate", "--defense", "spn", "--grid", "0.1", "--stage", "init", "--attack-batch", "1"]
PLACE = re.compile(r"(<!-- made by: python docs/readme\.py -->\n).*(<!-- /made -->)", re.DOTALL)
WIDTH = "100"
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
NEAR = 3.0
"""How far a quoted figure may be from today's, in its own unit: decibels and points differ between processors."""


def run(out: Path) -> str:
    """Return what the command prints, but for where its files are; they go to `out`."""
    environment = {**os.environ, "COLUMNS": WIDTH, "NO_COLOR": "1"}
    command = [sys.executable, "-m", *COMMAND, "--workers", "1", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
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
    """Return the strip of pictures at the head of the page in `out`."""
    import base64

    page = (out / "leaderboard.html").read_text(encoding="utf-8")
    strip = re.search(r'<img class="zoom" src="data:image/png;base64,([^"]+)"', page)
    if strip is None:
        raise SystemExit("the page has no strip of pictures")
    return base64.b64decode(strip[1])


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
        PICTURE.write_bytes(picture(out))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
