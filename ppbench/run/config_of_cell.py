"""The experiment behind a record: the cell of that name, made again from its configuration alone."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast

from ppbench.base.errors import UsageError
from ppbench.base.registry import load
from ppbench.base.seeds import Seeds
from ppbench.federation.plan import Local, Plan
from ppbench.nets.net import net_spec
from ppbench.records.run_files import commitment
from ppbench.records.schema import CellConfig, DataInfo, FederationInfo
from ppbench.report.controls import CONTROLS
from ppbench.run.cells import Cell, CellGroup, cells, groups
from ppbench.run.config import EvaluateConfig, recorded_options
from ppbench.run.experiment import Experiment, resolve
from ppbench.run.task import Task, make_task, optimizer_of
from ppbench.task.user_data import open_dataset


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
    targets = {name for one in filter(None, [attack.id, attack.follows]) for name in load("attacks", one).targets or ()}
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
        defense="none", dataset=text, model="unet" if loss == "bce" else "mlp", loss=cast(Any, loss), seed=seed,
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
