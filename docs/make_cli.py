"""Write docs/cli.md from the program itself: `python docs/make_cli.py`. A test holds the file to it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ppbench.base.errors import MEANINGS

HEAD = "<!-- Made by docs/make_cli.py from the program; change the program, not this file. -->\n\n"


def reference() -> str:
    """Return the reference of the command line as Markdown, by typer's own tool."""
    command = [sys.executable, "-m", "typer", "ppbench.commands", "utils", "docs", "--name", "ppbench"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True)
    return HEAD + printed.stdout.rstrip() + "\n\n" + exits()


def exits() -> str:
    """Return the table of exit codes as Markdown."""
    rows = [f"| {code.value} | {meaning} |" for code, meaning in sorted(MEANINGS.items())]
    return "\n".join(["## Exit codes", "", "| code | meaning |", "| --- | --- |", *rows, ""])


if __name__ == "__main__":
    Path(__file__).with_name("cli.md").write_text(reference())
