"""The cells of an evaluation, grouped by the view that they attack, and the cell of a record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from ppbench.adversary.attack import Attack
from ppbench.adversary.victims import probed_units
from ppbench.base.errors import UsageError
from ppbench.base.registry import load_plugin
from ppbench.base.seeds import Seeds
from ppbench.federation.plan import Local, Plan
from ppbench.federation.threats import ThreatModel, threat_model
from ppbench.metrics.perceptual import measurable, weights_identity
from ppbench.nets.net import net_spec
from ppbench.questions.base import question_of
from ppbench.records.run_files import commitment
from ppbench.records.schema import (
    AttackInfo,
    AuditInfo,
    CellConfig,
    DataInfo,
    DefenseInfo,
    FederationInfo,
    ProbeInfo,
    Scalar,
    ThreatInfo,
)
from ppbench.records.sources import code_of
from ppbench.report.controls import CONTROLS
from ppbench.run.audit.population import has_view
from ppbench.run.config import EvaluateConfig, recorded_options
from ppbench.run.experiment import Experiment, resolve, threats_of
from ppbench.run.options import Stage
from ppbench.run.task import Task, make_task, optimizer_of
from ppbench.task.user_data import open_dataset

RECORDS_BATCH = 1


@dataclass(frozen=True)
class CellGroup:
    """Cells that share a view and the role of their victims.

    records: whether they ask about records through a model, not about probes. acting: the attack that sent the weights,
    if the server acts.
    """

    point: int
    stage: Stage
    threat: ThreatModel
    batch: int
    records: bool
    role: str = ""
    acting: str = ""


@dataclass(frozen=True)
class Cell:
    """One cell of a group: an attack, and the attack whose reconstructions it follows (tracing)."""

    attack: Attack
    follows: str | None
    config: CellConfig
    id: str

    @property
    def tuned(self) -> bool:
        """Whether the attack's settings are tuned first; an attack that follows another uses its result instead."""
        return bool(self.config.tuning) and self.follows is None


def groups(experiment: Experiment) -> Iterator[CellGroup]:
    """Yield the groups of an experiment, point by point.

    Record questions are asked of trained models, and of iterates if the evaluated defense trains another model than it
    delivers; then of the controls too, for comparison.
    """
    visual, record, audited = (
        _threats(experiment, *where) for where in (("init", False), ("final", True), ("audit", True))
    )
    masked = any(point.defense.masked for point in experiment.points)
    for index, point in enumerate(experiment.points):
        for stage in experiment.config.stages:
            for threat in visual if stage in ("init", "final") else ():
                if masked and not threat.sees_uploads:
                    continue  # no attack here reads uploads out of perturbed broadcasts: a failure would say nothing
                # What a client learns is a sum over the others, and colluders are after one, whatever part it plays.
                mixed = not threat.sees_uploads or threat.colludes or threat.acts
                for batch in experiment.config.attack_batch:
                    for role in ("",) if mixed else point.defense.roles:
                        for acting in _acting(experiment, threat):
                            yield CellGroup(index, stage, threat, batch, False, role, acting)
            of_records = {"final": record, "iterate": record if masked else [], "audit": audited}
            for threat in of_records.get(stage, []):
                yield CellGroup(index, stage, threat, RECORDS_BATCH, True)


def _threats(experiment: Experiment, stage: Stage, records: bool) -> list[ThreatModel]:
    chosen = [attack for attack in experiment.attacks if runs_in(attack, stage, records)]
    some = {threat for attack in chosen for threat in threats_of(attack, experiment.config)}
    return sorted((t for t in some if stage != "audit" or has_view(t)), key=lambda threat: threat.name)


def inapplicable(experiment: Experiment) -> Iterator[str]:
    """Yield which attacks can use none of the requested threat models, and which of these an audit does not have."""
    config = experiment.config
    names = sorted(attack.name for attack in experiment.attacks if not any(threats_of(attack, config)))
    if names:
        yield f"Attacks that cannot use the view of {' or '.join(config.threats)} are left out: {', '.join(names)}."
    unseen = [name for name in config.threats if not has_view(threat_model(name))]
    if unseen and any(runs_in(attack, "audit", True) for attack in experiment.attacks) and "audit" in config.stages:
        yield f"An audit keeps the state and data of one client alone, so it has no view of {' or '.join(unseen)}."


def _acting(experiment: Experiment, threat: ThreatModel) -> list[str]:
    """Return the names of the attacks that each need a view of their own; [""] if all share one view."""
    return [a.name for a in experiment.attacks if threat.among(a.threats)] if threat.acts else [""]


def runs_in(attack: Attack, stage: Stage, records: bool) -> bool:
    """Return whether `attack` runs in groups of `stage` that ask about records (or else about probes)."""
    question = question_of(attack.kind)
    if stage == "audit":
        return question.audits or bool(attack.audit)
    return not attack.audit and (question.source == "model") == records


def _parameters(attack: Attack, follows: Attack | None) -> dict[str, Scalar]:
    own = attack.parameters()
    if follows is None:
        return own
    source = {"version": follows.version, **follows.parameters()}
    return {**own, **{f"{follows.name}.{name}": value for name, value in source.items()}}


def count_owners(experiment: Experiment, group: CellGroup) -> int:
    """Return the number of clients that own a group's victims; with roles, the largest possible number."""
    config, defense = experiment.config, experiment.points[group.point].defense
    roles, count = len(defense.roles) if group.role else 1, -(-config.victims_at(group.batch) // group.batch)
    _, units = probed_units(range(config.clients), group.threat, count, sums=defense.sums, roles=roles)
    return len({slot.client for unit in units for slot in unit})


def cells(experiment: Experiment, group: CellGroup) -> list[Cell]:
    """Return the cells of `group`, each attack before those that follow it, without cells that cannot show anything."""
    threat, config = group.threat, experiment.config
    chosen = [
        a for a in experiment.attacks if threat in threats_of(a, config) and runs_in(a, group.stage, group.records)
    ]
    chosen = [a for a in chosen if group.acting in ("", a.name)]
    if not group.records:
        owner_count = count_owners(experiment, group)
        chosen = [a for a in chosen if question_of(a.kind).owners <= owner_count]
    group_cells, defense = [], experiment.points[group.point].info
    for attack in sorted(chosen, key=lambda a: bool(question_of(a.kind).follows)):
        for follows in _sources(attack, chosen):
            cell_config = _cell_config(experiment, group, defense, attack, follows)
            group_cells.append(
                Cell(attack, follows.name if follows is not None else None, cell_config, cell_config.cell_id())
            )
    return group_cells


def _cell_config(
    experiment: Experiment, group: CellGroup, defense: DefenseInfo, attack: Attack, follows: Attack | None
) -> CellConfig:
    config = experiment.config
    data, model, federation = experiment.facts
    records, audited = group.records, group.stage == "audit"
    knows = attack.knows(defense.id)
    return CellConfig(
        suite=config.suite,
        suite_digest=config.suite_digest,
        threat_model=ThreatInfo(id=group.threat.name, sees=group.threat.sees, knows_defense=knows),
        defense=defense,
        attack=AttackInfo(
            id=attack.name,
            version=attack.version,
            kind=attack.kind,
            parameters=_parameters(attack, follows),
            adaptive=knows,
            follows=None if follows is None else follows.name,
            code=code_of(
                ("attacks", attack.name), ("questions", attack.kind), ("attacks", follows.name if follows else "")
            ),
        ),
        federation=federation,
        data=data,
        model=model,
        stage=group.stage,
        batch_size=group.batch,
        victims=config.candidates if records else config.victims_at(group.batch),
        victims_from=None if records else config.victims_from,
        seed=config.seed,
        **({} if records else {name: getattr(config, name) for name in ProbeInfo.model_fields}),
        role=group.role,
        perceptual=_perceptual(experiment, attack),
        tuning=config.tuning if len((follows or attack).variants()) > 1 else 0,
        audit=AuditInfo(**{n: getattr(config, n) for n in AuditInfo.model_fields}) if audited else None,
    )


def _sources(attack: Attack, chosen: list[Attack]) -> Sequence[Attack | None]:
    """Return the attacks whose answers `attack` follows, one per cell; [None] if it follows none."""
    source = "" if attack.audit else question_of(attack.kind).follows
    return [other for other in chosen if other.kind == source] if source else [None]


def _perceptual(experiment: Experiment, attack: Attack) -> str:
    perceptual = experiment.task.dataset.modality.perceptual and measurable(experiment.task.plan.spec.shape)
    return weights_identity(experiment.config.weights) if perceptual and question_of(attack.kind).inputs else ""


# -- The cell of a record, made again from its configuration alone --


def find_cell(
    config: CellConfig, data: str, salt: str = "", weights: str | None = None
) -> tuple[Experiment, CellGroup, Cell]:
    """Return the experiment, the group and the cell that `config` belongs to.

    data: the argument that opens its data set here (`run.sweep.local_dataset`). salt: the secret of its draws, ""
    for none. weights: of AlexNet. Raises UsageError if no cell of this name results: other code or data, a missing
    secret, a stand-in for an attack of another package, a network whose weights lie in a file.
    """
    name = config.cell_id()
    if commitment(salt) != config.data.salt:
        raise UsageError(f"Cell {name} was drawn with a secret; give the folder of results whose file `salt` holds it.")
    experiment = resolve(_config_of(config, data, salt, weights))
    for group in groups(experiment):
        for cell in cells(experiment, group):
            if cell.id == name:
                return experiment, group, cell
    raise UsageError(
        f"Cell {name} ({config.defense.id}, {config.attack.id}) cannot be computed again: with the code, data and "
        "packages installed here no cell has its name; compute it where it was made."
    )


def _config_of(config: CellConfig, data: str, salt: str, weights: str | None) -> EvaluateConfig:
    fed, model, attack = config.federation, config.model, config.attack
    size = len(open_dataset(data, seed=Seeds(config.seed, salt).seed("data")).train) if config.data.public else 1
    options = {
        **recorded_options(config, fed, *filter(None, [config.audit])),
        **_defense_options(config),
        **_split_options(config.data, size),
        "dataset": data,
        "model": model.id,
        "model_options": model.options,
        "loss": model.loss,
        "attacks": (attack.id, *filter(None, [attack.follows])),
        "batch_size": fed.batch,
        "attack_batch": (config.batch_size,),
        "candidates": max(4, config.victims),
        "stages": (config.stage,),
        "threats": (config.threat_model.id,),
        "tf32": bool(fed.tf32),
        "weights": weights,
        "salt": salt,
    }
    return EvaluateConfig(**options)


def _defense_options(config: CellConfig) -> dict[str, Any]:
    """Return the options of an evaluation of a cell's defense and attack, or of one beside which the control ran."""
    defense, attack = config.defense, config.attack
    named = {n if "." in n else f"{attack.id}.{n}": v for n, v in attack.parameters.items()}
    named.pop(f"{attack.follows}.version", None)
    targets = {
        name for one in filter(None, [attack.id, attack.follows]) for name in load_plugin("attacks", one).targets or ()
    }
    if defense.id in CONTROLS and targets and defense.id not in targets:  # it ran beside one of these
        return {"defense": min(targets), "grid": "quick", "settings": named}
    control = defense.control
    own = {name: v for name, v in defense.parameters.items() if control is None or name != control.name}
    grid = "quick" if control is None else (control.value,)
    return {"defense": defense.id, "grid": grid, "settings": {**own, **named}}


def _split_options(data: DataInfo, size: int) -> dict[str, Any]:
    """Return the options of a split of `size` training examples, whose share of public ones gives just their number."""
    return {"train": data.train, "public": (data.public + 0.5) / size if data.public else 0.0}


@lru_cache(maxsize=4)
def task_of_cell(text: str, loss: str, seed: int, salt: str, federation: str, data: str) -> Task:
    """Return the task of a cell from the data set `text` and the JSON of its federation and data; or UsageError."""
    fed, about = FederationInfo.model_validate_json(federation), DataInfo.model_validate_json(data)
    dataset = open_dataset(text, seed=Seeds(seed, salt).seed("data"))
    if dataset.sha256() != about.sha256:
        raise UsageError(f"its digest is {about.sha256[:16]}, that of the data set here {dataset.sha256()[:16]}")
    config = EvaluateConfig(
        defense="none", dataset=text, model=dataset.modality.network(loss) or "mlp", loss=cast(Any, loss), seed=seed,
        salt=salt, clients=fed.clients, partition=fed.partition, **_split_options(about, len(dataset.train)),
    )  # fmt: skip
    return make_task(config)


def plan_of_cell(config: CellConfig, network: str = "mlp", classes: int = 0) -> Plan:
    """Return a record's plan on `network`, a small one that stands in; classes: their number, 0 for the record's."""
    fed, model = config.federation, config.model
    local = Local(cast(Any, fed.upload), fed.local_epochs, fed.batch, optimizer_of(fed))
    spec = net_spec(network, tuple(model.shape), classes or model.classes)
    loss, schedule = cast(Any, model.loss), cast(Any, fed.schedule)
    kind = config.data.modality
    return Plan(spec, fed.clients, local, loss=loss, schedule=schedule, sample=fed.sample, kind=kind)
