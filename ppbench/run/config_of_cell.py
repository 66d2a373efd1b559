"""The experiment behind a record: the cell of that name, made again from its configuration alone."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast

from ppbench.base.errors import UsageError
from ppbench.base.registry import load
from ppbench.base.seeds import Seeds
from ppbench.federation.plan import Local, Opt, Plan
from ppbench.nets.net import net_spec
from ppbench.records.run_files import commitment
from ppbench.records.schema import CellConfig, DataInfo, FederationInfo, Scalar
from ppbench.report.controls import CONTROLS
from ppbench.run.cells import Cell, CellGroup, cells, groups
from ppbench.run.config import EvaluateConfig
from ppbench.run.experiment import Experiment, resolve
from ppbench.run.task import Task, make_task
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
    data_info, fed, model, audit = config.data, config.federation, config.model, config.audit
    defense, chosen = config.defense, config.attack
    targets = {
        name for attack in filter(None, [chosen.id, chosen.follows]) for name in load("attacks", attack).targets or ()
    }
    if defense.id in CONTROLS and targets and defense.id not in targets:  # it ran beside one of these
        defense_name, own, grid = min(targets), dict[str, Scalar](), cast(Any, "quick")
    else:
        control = defense.control
        defense_name, grid = defense.id, "quick" if control is None else (control.value,)
        own = {name: v for name, v in defense.parameters.items() if control is None or name != control.name}
    named = {n if "." in n else f"{chosen.id}.{n}": v for n, v in chosen.parameters.items()}
    named.pop(f"{chosen.follows}.version", None)
    train_size = len(open_dataset(data, seed=Seeds(config.seed, salt).seed("data")).train) if data_info.public else 1
    options: dict[str, Any] = {
        "references": audit.references, "canaries": audit.canaries, "canary_clients": audit.canary_clients,
    } if audit is not None else {}  # fmt: skip
    return EvaluateConfig(
        defense=defense_name,
        dataset=data,
        model=model.id,
        model_options=cast(Any, model.options),
        attacks=(chosen.id, *filter(None, [chosen.follows])),
        grid=grid,
        settings={**own, **named},
        train=data_info.train,
        public=(data_info.public + 0.5) / train_size if data_info.public else 0.0,
        clients=fed.clients,
        rounds=fed.rounds,
        local_epochs=fed.local_epochs,
        batch_size=fed.batch,
        schedule=cast(Any, fed.schedule),
        loss=cast(Any, model.loss),
        upload=cast(Any, fed.upload),
        optimizer=cast(Any, fed.optimizer),
        lr=fed.lr,
        momentum=fed.momentum,
        beta2=fed.beta2,
        decay_at=tuple(fed.decay_at),
        decay=fed.decay,
        partition=fed.partition,
        attack_batch=(config.batch_size,),
        probe=config.probe,
        probe_rounds=config.probe_rounds,
        victims=config.victims,
        victims_from=config.victims_from,
        candidates=max(4, config.victims),
        tuning=config.tuning,
        stages=(config.stage,),
        threats=(config.threat_model.id,),
        weights=weights,
        seed=config.seed,
        device=fed.device,
        tf32=bool(fed.tf32),
        sample=fed.sample,
        backend=cast(Any, fed.backend),
        salt=salt,
        suite=config.suite,
        suite_digest=config.suite_digest,
        **options,
    )


@lru_cache(maxsize=4)
def task_of_cell(text: str, loss: str, seed: int, salt: str, federation: str, data: str) -> Task:
    """Return the task of a cell from the data set `text` and the JSON of its federation and data; or UsageError."""
    fed, about = FederationInfo.model_validate_json(federation), DataInfo.model_validate_json(data)
    dataset = open_dataset(text, seed=Seeds(seed, salt).seed("data"))
    if dataset.sha256() != about.sha256:
        raise UsageError(f"its digest is {about.sha256[:16]}, that of the data set here {dataset.sha256()[:16]}")
    config = EvaluateConfig(
        defense="none", dataset=text, model="unet" if loss == "bce" else "mlp", loss=cast(Any, loss), seed=seed,
        salt=salt, train=about.train, public=(about.public + 0.5) / len(dataset.train) if about.public else 0.0,
        clients=fed.clients, partition=fed.partition,
    )  # fmt: skip
    return make_task(config)


def plan_of_cell(config: CellConfig, network: str = "mlp", classes: int = 0) -> Plan:
    """Return a record's plan on `network`, a small one that stands in; classes: their number, 0 for the record's."""
    fed, model = config.federation, config.model
    opt = Opt(cast(Any, fed.optimizer), fed.lr, fed.momentum, (0.9, fed.beta2), tuple(fed.decay_at), fed.decay)
    local = Local(cast(Any, fed.upload), fed.local_epochs, fed.batch, opt)
    spec = net_spec(network, tuple(model.shape), classes or model.classes)
    loss, schedule = cast(Any, model.loss), cast(Any, fed.schedule)
    return Plan(spec, fed.clients, local, loss=loss, schedule=schedule, sample=fed.sample)
