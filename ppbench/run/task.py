"""A task: a data set, its partition over clients and a network, as a configuration names them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from ppbench.adversary.victims import are_among
from ppbench.base.device import memory_of
from ppbench.base.errors import UsageError
from ppbench.base.machine import check_room
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params
from ppbench.federation.contract import Defense
from ppbench.federation.drive import chosen_backend
from ppbench.federation.plan import Columns, Data, Local, Opt, Plan
from ppbench.metrics.perceptual import Network
from ppbench.metrics.recognition import Gallery, gallery_of
from ppbench.nets.net import NetSpec, OptionValue, initial, net_spec, of_texts
from ppbench.records.run_files import commitment
from ppbench.records.schema import DataInfo, FederationInfo, ModelInfo
from ppbench.records.sources import code_of
from ppbench.run.config import EvaluateConfig
from ppbench.run.options import FederationOptions, TaskOptions, option_names
from ppbench.task.dataset import Dataset, predicting_tokens
from ppbench.task.partition import partition
from ppbench.task.user_data import open_dataset, plugins_of

TASK_FIELDS = {"model_options", "seed", "salt", *option_names(TaskOptions), *option_names(FederationOptions)} - {
    "rounds"
}
"""Fields of an evaluation that determine its task, and with it who is a victim."""


@dataclass(frozen=True)
class Task:
    """A learning task: the clients' shards, held-out data, initial public weights, the master seed's derivations."""

    dataset: Dataset
    plan: Plan
    shards: Mapping[int, Data]
    test: Data
    params: Params
    seeds: Seeds
    public: Data | None = None
    _galleries: dict[Network | None, Gallery | None] = field(default_factory=dict, compare=False, repr=False)

    @property
    def classified(self) -> bool:
        """Whether targets are classes; else they are numbers, and utility is an error, or masks."""
        return self.dataset.task == "classification"

    @property
    def segmented(self) -> bool:
        """Whether targets are masks; utility is then the overlap with them."""
        return self.dataset.modality.masked

    @property
    def predicts_tokens(self) -> bool:
        """Whether texts are their own targets; utility is then the share of next tokens that are predicted."""
        return self.plan.next_token

    def trained_tests(self) -> int:
        """Return how many test inputs some client has, value by value."""
        return int(are_among(self.test.x, torch.cat([shard.x for shard in self.shards.values()])).sum())

    def gallery(self, network: Network | None = None) -> Gallery | None:
        """Return held-out images for `metrics.recognition`, one object per network; None if data are no images."""
        if network not in self._galleries:
            order = torch.randperm(len(self.test.x), generator=self.seeds.generator("gallery"))
            gallery = gallery_of(self.test.x, self.test.y, order, self.dataset.data_range, self.classified, network)
            self._galleries[network] = gallery if self.dataset.modality.perceptual else None
        return self._galleries[network]


def plan_on(
    config: EvaluateConfig, spec: NetSpec, data_range: tuple[float, float], columns: Columns | None = None
) -> Plan:
    """Return the public plan that `config` describes, of the network `spec`, on inputs in `data_range`."""
    opt = optimizer_of(config)
    local = Local(config.upload, config.local_epochs, config.batch_size, opt)
    if config.sample > config.clients:
        raise UsageError(
            f"sample={config.sample} of {config.clients} clients cannot be drawn; give at most all of them."
        )
    return Plan(
        spec,
        config.clients,
        local,
        loss=config.loss,
        server_opt=opt if config.upload == "gradient" else Opt(),
        schedule=config.schedule,
        data_range=data_range,
        columns=columns,
        sample=config.sample if config.sample < config.clients else 0,
    )


def optimizer_of(training: EvaluateConfig | FederationInfo) -> Opt:
    """Return the optimizer of a training, as an evaluation or a record describes it."""
    betas, decay_at = (0.9, training.beta2), tuple(training.decay_at)
    return Opt(cast(Any, training.optimizer), training.lr, training.momentum, betas, decay_at, training.decay)


@lru_cache(maxsize=2)
def _dataset(name: str, seed: int) -> Dataset:
    return open_dataset(name, seed=seed)


@lru_cache(maxsize=2)
def task_of(key: str) -> Task:
    """Return the task that a `task_key` determines, one object per process (UsageError: it cannot be made)."""
    config = EvaluateConfig.model_validate_json(key)
    seeds = Seeds(config.seed, config.salt)
    dataset = _dataset(config.dataset, seeds.seed("data"))
    strata = dataset.train.strata
    options: Mapping[str, OptionValue] = config.model_options
    if config.loss == "next_token":
        dataset = predicting_tokens(dataset)
    if dataset.vocabulary is not None:
        options = of_texts(config.model, options, len(dataset.vocabulary), config.loss == "next_token")
    spec = net_spec(config.model, dataset.shape, dataset.classes, options)
    plan = plan_on(config, spec, dataset.data_range, dataset.columns)
    plan = replace(plan, kind=dataset.named_kind, vocabulary=dataset.vocabulary)
    check_fit(dataset, plan)
    _check_room(dataset, config)
    public, rest = _split_public(dataset, config.public, seeds)
    members, source = _members(dataset, rest, config.train, seeds), dataset.train.domain
    domain = source[members] if source is not None else None
    parts = partition(config.partition, strata[members], config.clients, seeds.seed("partition"), domain)
    shards = {client: dataset.train.take(members[index]) for client, index in enumerate(parts)}
    test = dataset.test.take(torch.arange(len(dataset.test.y)))
    apart = dataset.train.take(public) if len(public) else None
    return Task(dataset, plan, shards, test, initial(plan.spec, seeds.seed("model")), seeds, apart)


def check_fit(dataset: Dataset, plan: Plan) -> None:
    """Refuse a loss or a network that does not suit the targets of `dataset` (UsageError)."""
    losses, targets = {
        "classification": (("cross_entropy", "squared"), "classes"),
        "regression": (("squared",), "numbers"),
        "segmentation": (("bce",), "masks"),
        "next_token": (("next_token",), "the next tokens"),
    }[dataset.task]
    if plan.loss not in losses:
        right = " or ".join(losses)
        raise UsageError(f"Data set {dataset.name!r} has {targets} as targets; use --loss {right}, not {plan.loss!r}.")
    if bool(plan.net.embedding) != (dataset.vocabulary is not None):
        own = "'transformer', 'gpt', or one of yours whose nn.Embedding reads token numbers [B, L]"
        takes, right = ("texts", "another") if plan.net.embedding else ("no texts", own)
        raise UsageError(
            f"Data set {dataset.name!r} has {dataset.modality.inputs}, but model {plan.spec.model!r} takes {takes}; "
            f"use {right}."
        )
    if plan.net.every_token != plan.next_token:
        gives, right = ("every token", "next_token") if plan.net.every_token else ("a text", "cross_entropy")
        also = ", or a model that answers every token, as 'gpt'" if plan.next_token else ""
        raise UsageError(f"Model {plan.spec.model!r} answers {gives}; use --loss {right}{also}.")
    if dataset.vocabulary is not None and plan.net.rows < len(dataset.vocabulary):
        raise UsageError(
            f"Data set {dataset.name!r} has {len(dataset.vocabulary)} tokens, but the embedding of model "
            f"{plan.spec.model!r} has {plan.net.rows}; give it as many."
        )
    if plan.net.pixelwise != dataset.modality.masked:
        makes, right = ("masks", "another") if plan.net.pixelwise else ("one answer an image", "'unet'")
        raise UsageError(
            f"Data set {dataset.name!r} has {targets} as targets, but model {plan.spec.model!r} gives {makes}; use "
            f"{right}."
        )


def _check_room(dataset: Dataset, config: EvaluateConfig) -> None:
    """Refuse data, and batches of a client's local epochs, that memory cannot hold (UsageError)."""
    one, count = 4 * math.prod(dataset.shape), len(dataset.train) + len(dataset.test)
    check_room(one * count, f"The {count:,} examples of data set {dataset.name!r}", "use a smaller data set")
    epochs = config.local_epochs if config.upload == "delta" else 1
    shard = -(-min(config.train or len(dataset.train), len(dataset.train)) // config.clients)
    check_room(one * epochs * shard, f"The batches of {epochs:,} local epochs of a client", "use fewer --local-epochs")


def check_clients(defense: Defense, plan: Plan, config: EvaluateConfig, examples: int) -> None:
    """Refuse clients that compute at once, with `examples` each, and that memory cannot hold (UsageError)."""
    device = torch.device(config.device)
    backend = chosen_backend(config.backend if defense.mappable else "loop", device, plan)
    clients = plan.clients if backend == "vmap" and plan.schedule == "parallel" else 1
    what = f"A client of defense {defense.name!r}" if clients == 1 else f"{clients} clients of defense {defense.name!r}"
    right = "use a smaller model" if clients == 1 else "use fewer clients, a smaller model, or --schedule round_robin"
    size = 4.0 * plan.net.parameter_count * defense.copies(plan, clients, examples)
    at_once = "" if clients == 1 else " that compute at once"
    check_room(size, f"{what} with model {plan.spec.model!r}{at_once}", right, memory_of(device))


def _split_public(dataset: Dataset, share: float, seeds: Seeds) -> tuple[Tensor, Tensor]:
    size = len(dataset.train)
    order = torch.randperm(size, generator=seeds.generator("public")) if share else torch.arange(size)
    count = int(share * size)
    return order[:count].sort().values, order[count:].sort().values


def _members(dataset: Dataset, rest: Tensor, count: int | None, seeds: Seeds) -> Tensor:
    """Return the indices of the training examples: `count` of `rest` drawn at random, ascending, or all."""
    if count is None:
        return rest
    if count > len(rest):
        left = "training examples" if len(rest) == len(dataset.train) else "training examples that are not public"
        raise UsageError(f"Option train={count} cannot be used: {dataset.name!r} has {len(rest)} {left}.")
    return rest[torch.randperm(len(rest), generator=seeds.generator("train"))[:count].sort().values]


def make_task(config: EvaluateConfig) -> Task:
    """Return the task of `config`; see `task_of`."""
    return task_of(task_key(config))


def task_key(config: EvaluateConfig) -> str:
    """Return the fields of `config` that determine its task, as JSON: equal keys mean equal tasks."""
    return EvaluateConfig(defense="none", **{name: getattr(config, name) for name in TASK_FIELDS}).model_dump_json()


def describe(task: Task, config: EvaluateConfig) -> tuple[DataInfo, ModelInfo, FederationInfo]:
    """Return the parts of a cell's configuration that a task determines."""
    dataset, plan = task.dataset, task.plan
    public = 0 if task.public is None else len(task.public.x)
    members = sum(len(shard.x) for shard in task.shards.values())
    stated = bool(plan.net.frozen) or plan.net.module.from_file
    data = DataInfo(
        name=dataset.name,
        sha256=dataset.sha256(),
        train=members,
        test=len(dataset.test.y),
        public=public,
        code=code_of(*(("datasets", name) for name in plugins_of(config.dataset)), ("modalities", plan.kind)),
        salt=commitment(config.salt),
        modality=plan.kind,
    )
    model = ModelInfo(
        id=plan.spec.model,
        # A file is identified by its content, not by its path.
        options={**dict(plan.spec.options), **({"weights": f"sha256:{plan.net.weights_sha256}"} if stated else {})},
        shape=list(plan.spec.shape),
        classes=plan.spec.classes,
        parameters=plan.net.parameter_count,
        loss=plan.loss_name,
        code=code_of(("models", plan.spec.model)),
    )
    chosen = {name: value for name, value in config if name in FederationInfo.model_fields}
    chosen["sample"] = plan.sample  # 0 where all are drawn
    if torch.device(config.device).type == "cpu":
        chosen["tf32"] = None
    server = plan.server_opt
    federation = FederationInfo(
        **chosen, batch=config.batch_size, server_optimizer=server.name, server_lr=server.lr, dtype="float32"
    )
    return data, model, federation
