"""The tutorial for users of Flower, followed to the letter beside Flower; its first line, which installs, is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tutorials
from tutorials import lacking

pytest.importorskip("flwr")

PAGE = "tutorial-flower.md"


def test_the_tutorial_for_users_of_flower_is_followed(tmp_path: Path) -> None:
    printed, work = tmp_path / "printed", tmp_path / "work"
    printed.mkdir()
    work.mkdir()
    text, typed = tutorials.script(PAGE, printed)
    install, text = typed[0], text.replace(typed[0].text, ":\n")
    assert "pip install 'ppbench-fl[flower]'" in install.text
    bench = work / "bin"
    bench.mkdir()
    (bench / "ppbench").write_text(f'#!/bin/sh\nexec {sys.executable} -m ppbench "$@"\n')
    (bench / "ppbench").chmod(0o755)
    root = Path(__file__).parents[1]
    environment = {
        "PATH": f"{bench}:/usr/bin:/bin", "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8", "HOME": str(tmp_path),
    }  # fmt: skip
    done = subprocess.run(["bash", "-c", text], cwd=work, env=environment, capture_output=True, text=True, check=False)
    output = [(printed / str(place)).read_text() for place in range(len(typed)) if (printed / str(place)).exists()]
    assert done.returncode == 0, output[-1] + done.stderr
    wrong = [part for block, out in zip(typed[1:], output[1:], strict=True) for part in lacking(block, out)]
    assert not wrong, "\n".join([*wrong, *output])
