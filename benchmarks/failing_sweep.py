"""Sweep what cannot all be had: an attack that kills its worker, a training that raises. Part of kill_sweep.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ppbench.records.store import Store


@dataclass(frozen=True)
class Failures:
    """A sweep in which an attack kills its worker once, and one defense raises in training.

    Attributes:
        complete: cells with a result.
        failed: causes of the others, with their number.
        board: whether the table is there.
    """

    complete: int
    failed: Mapping[str, int]
    board: bool

    @property
    def sound(self) -> bool:
        """Whether the one deadly cell and the four of the other defense failed, and nothing else."""
        return self.complete == 11 and sorted(self.failed.values()) == [1, 4] and self.board


def fail(folder: Path, text: str, run: Callable[[Path, Path, Path], object]) -> Failures:
    """Have `run` (suite, output folder, log) sweep 16 cells of which five cannot be had."""
    text = text.replace('"init", "final"', '"init"')
    text = text.replace("planted_slow", "planted_deadly").replace("seconds = 0", 'defense = "ppdl"')
    suite, out = folder / "fail.toml", folder / "failures"
    suite.write_text(text + '\n[[defense]]\nid = "planted_sore"\n')
    run(suite, out, folder / "fail.log")
    records = Store(out).load_all()
    causes = Counter(r.reason or "" for r in records if r.status == "failed")
    complete = sum(r.status == "complete" for r in records)
    return Failures(complete, dict(causes), (out / "leaderboard.csv").is_file())
