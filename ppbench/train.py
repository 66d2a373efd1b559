"""Train one point of an evaluation, or find it trained: a finished training is never run again."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from ppbench import __version__
from ppbench.config import EvaluateConfig, Point
from ppbench.federation.engine import Federation
from ppbench.metrics.intervals import clopper_pearson
from ppbench.records.schema import Cost, Privacy, Strict, Utility
from ppbench.task.task import Task, describe


class Trained(Strict):
    """What training a point gave, beside the states themselves.

    seconds: wall time of training; never part of a record.
    """

    utility: Utility
    cost: Cost
    privacy: Privacy
    diverged: bool
    seconds: float


def federation(task: Task, point: Point, config: EvaluateConfig) -> Federation:
    """Return a federation of `task` under the point's defense, not yet started."""
    return Federation(point.defense, task.plan, task.shards, task.seeds, torch.device(config.device), config.backend)


def _name(task: Task, point: Point, config: EvaluateConfig) -> str:
    """Return the name of a training: the hash of everything that determines it."""
    parts = [part.model_dump(mode="json") for part in describe(task, config)]
    about = [__version__, repr(point.defense), point.defense.version, config.seed, *parts]
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]


def trained(task: Task, point: Point, config: EvaluateConfig, cache: Path) -> bool:
    """Return whether `cache` holds this training, finished."""
    return (cache / _name(task, point, config) / "trained.json").is_file()


def train(
    task: Task, point: Point, config: EvaluateConfig, cache: Path, after: Callable[[int], None] | None = None
) -> tuple[Federation, Trained]:
    """Return the trained federation and its figures, from `cache` where they are.

    Args:
        task: what is learnt.
        point: the defense at one control value.
        config: the evaluation.
        cache: folder of finished trainings; a checkpoint appears in it whole or not at all.
        after: called with each finished round.
    """
    home = cache / _name(task, point, config)
    fed = federation(task, point, config)
    if (home / "trained.json").is_file():
        fed.restore(home)
        return fed, Trained.model_validate_json((home / "trained.json").read_text())
    fed.start(task.params)
    curve: list[tuple[int, float]] = []

    def watch(round_: int) -> None:
        if round_ % max(1, config.rounds // 10) == 0 or round_ == config.rounds:
            curve.append((round_, fed.accuracy(task.test)))
        if after is not None:
            after(round_)

    finished = fed.run(config.rounds, watch)
    result = _figures(fed, task, curve, finished)
    cache.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".training-", dir=cache))
    try:
        fed.save(draft)
        (draft / "trained.json").write_text(result.model_dump_json())
        if not home.exists():
            draft.rename(home)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return fed, result


def _figures(fed: Federation, task: Task, curve: list[tuple[int, float]], finished: bool) -> Trained:
    """Return accuracy, bytes and guarantee of a training that has ended."""
    n, chance, plan = len(task.test.x), 1 / task.plan.spec.classes, fed.plan
    accuracy = curve[-1][1] if finished else None
    interval = clopper_pearson(round(curve[-1][1] * n), n) if finished else None
    reason = None if finished else f"the model was not finite after round {fed.round}"
    utility = Utility(
        accuracy=accuracy,
        low=interval.low if interval else None,
        high=interval.high if interval else None,
        n=n,
        chance=chance,
        curve=curve,
        reason=reason,
    )
    per = plan.clients * fed.round
    cost = Cost(
        bytes_up=(fed.wire.up - fed.setup_up) / per,
        bytes_down=(fed.wire.down - fed.setup_down) / per,
        bytes_setup=fed.setup_up + fed.setup_down,
    )
    smallest = min(len(shard.x) for shard in fed.shards.values())
    guarantee = fed.defense.epsilon(plan, smallest, fed.round)
    privacy = Privacy(
        epsilon=guarantee[0] if guarantee else None,
        delta=guarantee[1] if guarantee else None,
        reason=None if guarantee else fed.defense.epsilon_reason,
    )
    return Trained(utility=utility, cost=cost, privacy=privacy, diverged=not finished, seconds=fed.seconds)
