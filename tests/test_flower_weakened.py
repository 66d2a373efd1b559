"""Who weakens a mod is found: a copy of Flower's that divides its noise by ten, by `ppbench compare`, beside Flower."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr")

MECHANISM = '''
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp.strategy import FedAvg

def local(std=0.1):
    """Local DP by its standard deviation."""
    return FedAvg(), [LocalDpMod(1.0, std / {divisor}, 4.844805262279769, 1e-5)]
'''
QUICK = (
    *("--grid", "0.1", "--attack", "idlg,analytic,label_recovery", "--stage", "init", "--attack-batch", "1"),
    *("--victims", "12", "--rounds", "8", "--lr", "0.3", "--local-epochs", "2", "--model", "mlp", "--workers", "1"),
)


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run ppbench as its user does, in a folder with the mechanism."""
    code = "import sys; from ppbench.__main__ import main; sys.exit(main())"
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", code, *words], cwd=folder, env={**os.environ, "PYTHONPATH": path}, text=True,
        capture_output=True, check=False, timeout=300,
    )  # fmt: skip


def evaluated(folder: Path, out: str, divisor: int) -> None:
    (folder / "deployed.py").write_text(MECHANISM.format(divisor=divisor))
    done = command(folder, "evaluate", "--defense", "flower:deployed:local", *QUICK, "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_mod_whose_noise_was_divided_by_ten_is_found(tmp_path: Path) -> None:
    evaluated(tmp_path, "before", 1)
    evaluated(tmp_path, "same", 1)
    evaluated(tmp_path, "weakened", 10)
    same = command(tmp_path, "compare", "before", "same")
    assert same.returncode == 0, same.stdout + same.stderr
    weaker = command(tmp_path, "compare", "before", "weakened")
    assert weaker.returncode == 1, weaker.stdout + weaker.stderr
    assert "flower:deployed:local" in weaker.stdout
