"""Jobs: the pieces in which work is handed to an engine, and what a worker does with one.

A job is small and whole in itself: it names its evaluation, and what it makes lands in the output folder by rename,
under names that are hashes. So a job may run anywhere that sees the folder, and may be run again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ppbench.run.audit.runs import Audit
from ppbench.run.cells import Group
from ppbench.run.choice import points
from ppbench.run.config import EvaluateConfig
from ppbench.run.group import run_group
from ppbench.run.task import make_task
from ppbench.run.train import train

Tell = Callable[[int], None]
"""Called with the number of rounds of training that were finished."""


@dataclass(frozen=True)
class Job:
    """One piece of work: train a point (`group` None), some runs of its audit (`runs`), or compute cells of a group.

    Attributes:
        config: the evaluation (`EvaluateConfig`) as JSON.
        out: the folder of results.
        point: index of the point.
        group: the group whose cells are computed, or None.
        cells: names of the cells to compute; others of the group are not touched.
        runs: runs of the audit, empty for the training itself.
    """

    config: str
    out: Path
    point: int
    group: Group | None = None
    cells: tuple[str, ...] = ()
    runs: range = range(0)

    @property
    def rounds(self) -> int:
        """Rounds of training that the job has, 0 of one that computes cells."""
        if self.group is not None:
            return 0
        return EvaluateConfig.model_validate_json(self.config).rounds * max(1, len(self.runs))


def work(job: Job, tell: Tell | None = None) -> None:
    """Do a job; whatever of it lies finished in the folder is not done again.

    Raises:
        Refused: a defense refuses the audit.
        UsageError: the folder cannot be written or a file in it is damaged.
        Exception: whatever a defense's own code raises in training; attacks fail by themselves, see `Bench`.
    """
    config = EvaluateConfig.model_validate_json(job.config)
    if job.group is not None:
        run_group(config, job.group, job.out, job.cells)
        return
    task, point, cache = make_task(config), points(config)[job.point], job.out / "cache"
    after = None if tell is None else partial(_one, tell)
    if job.runs:
        Audit.of(task, point, config, cache).run(job.runs, after)
    else:
        train(task, point, config, cache, after)


def _one(tell: Tell, _: int) -> None:
    """Tell of one more round; which one it was does not matter."""
    tell(1)
