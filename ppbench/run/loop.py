"""A defense in a user's own loop, attacks on its uploads: plugins by name, a federation of the user's data and network.

This is the code of the bench: `federate` returns the bench's own `Federation`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch.nn import Module

from ppbench.adversary.attack import Attack, Challenge
from ppbench.base.device import check_device, computing
from ppbench.base.errors import UsageError, shown, unknown
from ppbench.base.fence import guard, made
from ppbench.base.registry import admit
from ppbench.base.seeds import Seeds
from ppbench.federation.contract import Defense
from ppbench.federation.engine import Federation
from ppbench.federation.plan import Data
from ppbench.federation.threats import HONEST_SERVER
from ppbench.federation.view import View
from ppbench.federation.wire import Slot
from ppbench.nets.model_object import held_network
from ppbench.nets.net import HeldSpec
from ppbench.records.schema import Scalar
from ppbench.run.config import configure
from ppbench.run.experiment import make_attack
from ppbench.run.options import FederationOptions, option_names
from ppbench.run.task import check_clients, plan_on
from ppbench.run.user_inputs import (
    Shard,
    are_texts,
    check_batch,
    check_range,
    check_real,
    examples_of,
    inputs_of,
    plan_of_texts,
    range_of,
    shards_of,
    texts_alone,
)

TRAINING = (
    *("loss", *(name for name in option_names(FederationOptions) if name != "rounds")),
    *("seed", "device", "tf32", "backend"),
)
"""Options of an evaluation that concern the clients' training."""


def load_defense(name: str, /, **parameters: Scalar) -> Defense:
    """Return a defense by its name, as `--defense` takes it, with these parameters, as `--set` takes them.

    UsageError: an unknown name or parameter, or a value of another type or out of bounds.
    """
    _check_name("defense", name)
    admit(name)
    return made("defenses", Defense, name, parameters, lambda defense: defense.check_bounds())


def load_attack(name: str, /, **parameters: Scalar) -> Attack:
    """Return an attack by its name, as `--attack` takes it, with these parameters; UsageError as `load_defense`."""
    _check_name("attack", name)
    return make_attack(name, parameters)


def _check_name(kind: str, name: Any) -> None:
    if not isinstance(name, str):
        raise UsageError(f"The {kind} is {shown(name, 60)}; give its name, as `ppbench list {kind}s` has it.")


@computing()
def federate(
    defense: Defense,
    model: Module,
    shards: Sequence[Shard],
    *,
    data_range: tuple[float, float] = (0.0, 1.0),
    norms: Literal["batch", "tracked"] = "batch",
    **training: Any,
) -> Federation:
    """Return a federation of a user's network and data under a defense, set up, at the network's own weights.

    `run(n)` trains up to round n; `outputs(x)` are the logits that clients compute in the end; byte counts lie in
    `wire`; `probe` below shows what the server sees. Its network is a copy: `model` is left as it is.

    Args:
        defense: as `load_defense` gives it.
        model: as of `invert`.
        shards: each client's inputs [N, *shape] (texts: token numbers [N, L], int64) and classes [N], arrays, under
            loss="next_token" texts alone; or a `Dataset` or `DataLoader` of such pairs, which is read once.
        data_range: least and greatest value of an input; those of the shards must lie in it.
        norms: "tracked": running statistics of norms in training mode move, are sent and averaged as weights are, and
            used by `outputs`, as where frameworks send a state dict. "batch": all take those of the batch at hand.
        training: how clients train, as `evaluate` takes it: upload, optimizer, lr, momentum, beta2, local_epochs,
            batch_size, loss, schedule, decay_at, decay; and seed, device, tf32, backend. Defaults: as the
            defense's paper needs them, else as in an evaluation.

    Raises UsageError, one sentence: an argument cannot be used, or the defense does not suit the network.
    """
    _check_given(defense, training)
    spec, data = _network_and_data(model, shards, ends := range_of(data_range), norms, training.get("loss"))
    config = configure(defense=defense.name, clients=len(data), **training)
    plan = plan_of_texts(plan_on(config, spec, ends), None)
    check_device(config.device)
    check_batch(plan, min(config.batch_size, *(len(shard.x) for shard in data.values())))
    check_clients(defense, plan, config, min(len(shard.x) for shard in data.values()))
    own = defense, plan, data, Seeds(config.seed), torch.device(config.device), config.backend
    federation = Federation(*own, tf32=config.tf32)
    with guard("defenses", defense.name):
        federation.start(spec.start)
    return federation


def _check_given(defense: Any, training: Iterable[str]) -> None:
    if other := next((name for name in training if name not in TRAINING), None):
        raise unknown("option of training", other, TRAINING)
    if not isinstance(defense, Defense):
        raise UsageError(f"The defense is {shown(defense, 60)}; give what load_defense gives.")


def _network_and_data(
    model: Module, shards: Sequence[Shard], data_range: tuple[float, float], norms: str, loss: Any
) -> tuple[HeldSpec, dict[int, Data]]:
    """Return a copy of a user's network, for inputs such as the first client's, and each client's examples, checked."""
    next_token = isinstance(loss, str) and loss == "next_token"
    pairs = shards_of(texts_alone(shards) if next_token else shards)
    check_real(model)
    if norms not in ("batch", "tracked"):
        raise UsageError(f"norms={shown(norms)} cannot be used; it must be 'batch' or 'tracked'.")
    tracked, texts = norms == "tracked", are_texts(pairs[0][0])
    shape = tuple(inputs_of(0, pairs[0][0], texts=texts).shape[1:])
    spec = held_network(model, shape, data_range, when="", tracked=tracked, texts=texts, every_token=next_token).spec
    texts = texts and bool(spec.net.embedding)
    if tracked and not spec.net.statistics:
        words = "has no batch norm in training mode that moves running statistics by a momentum"
        raise UsageError(f"norms='tracked' cannot be used: model {spec.model!r} {words}.")
    data = {k: examples_of(k, own, spec.shape, spec.classes, texts, next_token) for k, own in enumerate(pairs)}
    check_range(data, (0.0, spec.net.rows - 1.0) if texts else data_range, texts)
    return spec, data


@computing()
def probe(federation: Federation, batches: Sequence[Shard]) -> tuple[View, list[Challenge]]:
    """Return an honest-but-curious server's view of clients that hold these batches, and one question per batch.

    Client 0 holds the first batch, client 1 the second, and nothing else; each does what victims of the bench do under
    this defense: uploads one gradient of it, or what the defense's `setting` says. The probe is a fork: the federation
    does not change. `attack.run(view, questions, torch.Generator().manual_seed(0))` then returns one `Guess` per
    question. If only sums can be read, there is one question, about all clients.

    UsageError: batches of unlike sizes, more than there are clients, or fewer where the defense needs them all.
    """
    if not isinstance(federation, Federation):
        raise UsageError(f"The federation is {shown(federation, 60)}; give what federate gives.")
    plan, defense = federation.plan, federation.defense
    pairs = shards_of(texts_alone(batches) if plan.next_token else batches, "batches")
    form = plan.spec.shape, plan.spec.classes, plan.vocabulary is not None, plan.next_token
    data = {Slot(0, k): examples_of(k, own, *form) for k, own in enumerate(pairs)}
    check_range(data, plan.data_range, plan.vocabulary is not None)
    sizes = {len(own.x) for own in data.values()}
    whole = defense.sums or len(defense.roles) > 1
    if len(sizes) != 1 or len(data) > plan.clients or (whole and len(data) < plan.clients):
        right = f"{'' if whole else 'up to '}{plan.clients}, of one size"
        raise UsageError(f"There are {len(data)} batches of {sorted(sizes)} examples; give {right}.")
    check_batch(plan, min(sizes))
    setting = defense.setting.get("quick", {})
    with guard("defenses", defense.name):
        transcript = federation.probe(data, setting.get("probe", "gradient"), setting.get("probe_rounds", 1))
    units = [tuple(data)] if defense.sums else [(slot,) for slot in data]
    return transcript.view(HONEST_SERVER), [Challenge(unit, min(sizes)) for unit in units]
