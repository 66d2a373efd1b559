"""Cells: which ones an evaluation has, grouped by the view that they attack."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ppbench.adversary.attack import Attack
from ppbench.base.errors import UsageError
from ppbench.federation.view import THREATS
from ppbench.metrics.perceptual import identity, measurable
from ppbench.questions.base import question_of
from ppbench.records.schema import (
    AttackInfo,
    AuditInfo,
    CellConfig,
    Control,
    DefenseInfo,
    Scalar,
    ThreatModel,
)
from ppbench.records.store import Store
from ppbench.run.choice import attacks, points, threats_of
from ppbench.run.config import EvaluateConfig, Stage
from ppbench.run.task import Task, describe

RECORDS_BATCH = 1


@dataclass(frozen=True)
class Group:
    """Cells that share a view: one point, stage, threat model and batch size, and victims who played one role.

    records: asks about records through the model that a client holds (membership, extraction), not about probes.
    """

    point: int
    stage: Stage
    threat: str
    batch: int
    records: bool
    role: str = ""


@dataclass(frozen=True)
class Cell:
    """One cell of a group: an attack, and the attack whose reconstructions it follows (tracing)."""

    attack: Attack
    follows: str | None
    config: CellConfig
    id: str

    @property
    def tuned(self) -> bool:
        """Whether the attack's own settings are tried first; one that follows another takes what that one gave."""
        return bool(self.config.tuning) and self.follows is None


def fitting(task: Task, config: EvaluateConfig) -> list[Attack]:
    """Return the evaluation's attacks that can say something about the task's network and loss, and of the probes.

    Raises:
        UsageError: an attack that was named cannot.
    """
    found = []
    for attack in attacks(config):
        if attack.suits(task.plan) and config.probe in attack.probes:
            found.append(attack)
        elif attack.name in config.attacks:
            why = (
                f"model {config.model!r} with loss {config.loss!r}"
                if config.probe in attack.probes
                else (f"--probe {config.probe}")
            )
            raise UsageError(f"Attack {attack.name!r} has no use for {why}; leave it out.")
    return found


def groups(task: Task, config: EvaluateConfig) -> Iterator[Group]:
    """Yield the groups of an evaluation, point by point.

    Membership and extraction are asked of trained models only, and on iterates where the evaluated defense trains
    clients on another model than it delivers; then of the controls too, to stand beside. An audit has trainings of its
    own, on which all membership attacks run.
    """
    chosen = fitting(task, config)
    visual = {t for a in chosen if asked(a, "init", False) for t in threats_of(a, config)}
    record = {t for a in chosen if asked(a, "final", True) for t in threats_of(a, config)}
    audited = {t for a in chosen if asked(a, "audit", True) for t in threats_of(a, config)}
    every = points(config)
    masked = any(point.defense.masked for point in every)
    for index in range(len(every)):
        for stage in config.stages:
            for threat in sorted(visual) if stage in ("init", "final") else []:
                if masked and threat.startswith("client/"):
                    continue  # no attack here reads uploads out of perturbed broadcasts: a failure would say nothing
                # What a client learns is a sum over the others, and colluders are after one, whatever part it plays.
                mixed = threat.startswith(("client/", "collusion/"))
                roles = ("",) if mixed else every[index].defense.roles
                for batch, role in itertools.product(config.attack_batch, roles):
                    yield Group(index, stage, threat, batch, False, role)
            if stage == "final" or (stage == "iterate" and masked):
                for threat in sorted(record):
                    yield Group(index, stage, threat, RECORDS_BATCH, True)
            for threat in sorted(audited) if stage == "audit" else []:
                yield Group(index, stage, threat, RECORDS_BATCH, True)


def asked(attack: Attack, stage: Stage, records: bool) -> bool:
    """Return whether `attack` is run in groups of `stage` that ask about records, or about probes."""
    question = question_of(attack.kind)
    if stage == "audit":
        return question.audits or bool(attack.audit)
    return not attack.audit and (question.source == "model") == records


def _scalars(value: object) -> dict[str, Scalar]:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else {}


def _parameters(attack: Attack, follows: Attack | None) -> dict[str, Scalar]:
    """Return what determines an attack's answers, its source's version and parameters included."""
    own = attack.parameters()
    if follows is None:
        return own
    source = {"version": follows.version, **follows.parameters()}
    return {**own, **{f"{follows.name}.{name}": value for name, value in source.items()}}


def cells(task: Task, config: EvaluateConfig, group: Group) -> list[Cell]:
    """Return the cells of `group`, attacks before those that follow them."""
    point = points(config)[group.point]
    data, model, fed = describe(task, config)
    defense = point.defense
    control = None if defense.control is None else Control(name=defense.control, value=point.value or 0.0)
    chosen = [
        a
        for a in fitting(task, config)
        if group.threat in threats_of(a, config) and asked(a, group.stage, group.records)
    ]
    found = []
    for attack in sorted(chosen, key=lambda a: bool(question_of(a.kind).follows)):
        for follows in _sources(attack, chosen):
            cell = CellConfig(
                suite=config.suite,
                suite_digest=config.suite_digest,
                threat_model=ThreatModel(
                    id=group.threat, sees=THREATS[group.threat], knows_defense=attack.knows(defense.name)
                ),
                defense=DefenseInfo(
                    id=defense.name, version=defense.version, parameters=_scalars(defense), control=control
                ),
                attack=AttackInfo(
                    id=attack.name,
                    version=attack.version,
                    kind=attack.kind,
                    parameters=_parameters(attack, follows),
                    adaptive=attack.knows(defense.name),
                    follows=follows.name if follows is not None else None,
                ),
                federation=fed,
                data=data,
                model=model,
                stage=group.stage,
                batch_size=group.batch,
                victims=config.candidates if group.records else config.victims,
                seed=config.seed,
                probe="gradient" if group.records else config.probe,
                probe_rounds=1 if group.records else config.probe_rounds,
                role=group.role,
                perceptual=_perceptual(task, config, attack),
                tuning=config.tuning if len((follows or attack).variants()) > 1 else 0,
                audit=AuditInfo(references=config.references, canaries=config.canaries)
                if group.stage == "audit"
                else None,
            )
            found.append(Cell(attack, follows.name if follows is not None else None, cell, cell.cell_id()))
    return found


def _sources(attack: Attack, chosen: list[Attack]) -> Sequence[Attack | None]:
    """Return the attacks whose answers `attack` follows, one cell each; [None] where it follows none."""
    source = "" if attack.audit else question_of(attack.kind).follows
    return [other for other in chosen if other.kind == source] if source else [None]


def _perceptual(task: Task, config: EvaluateConfig, attack: Attack) -> str:
    """Return the feature network that the attack's images are measured with, "" for none."""
    images = question_of(attack.kind).inputs and measurable(task.plan.spec.shape)
    return identity(config.weights) if images else ""


def finished(store: Store, cell: Cell) -> bool:
    """Return whether `store` holds the cell and need not run it again; a failed one is tried anew."""
    return store.has(cell.id) and store.load(cell.id).status != "failed"
