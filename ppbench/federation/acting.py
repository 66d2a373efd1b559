"""An active server: before a round it replaces the model's weights by crafted ones.

The clients' code, the defense's server code and all secrets are unchanged; only the weights at the begin of the round
are crafted, of the agreed architecture. If one client gets other weights than the rest (model inconsistency, Pasquini
et al., CCS 2022), the defense's own round runs once for each version, from equal draws, so masks, sessions and secrets
are those of one round. Each client receives the message of its version; both versions receive all answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ppbench.base.errors import UsageError
from ppbench.base.tree import Params, Tree, finite
from ppbench.federation.contract import Defense, Round, Server, Step
from ppbench.federation.drive import Drive
from ppbench.federation.plan import Data, Plan


@dataclass(frozen=True)
class Before:
    """What an active server knows before a round: no client's data, and no client's secret.

    plan: of the next round, whose `local.batch` bounds the examples of a gradient; server: its whole state; cohort: the
    clients of the round; target: the attacked client, None for all; public: examples that no client has.
    """

    plan: Plan
    defense: Defense
    server: Server
    cohort: tuple[int, ...]
    target: int | None
    public: Data | None


@dataclass(frozen=True)
class Sent:
    """Crafted weights. params: for the target, or for all; others: for all but the target, None for the same."""

    params: Params
    others: Params | None = None


Craft = Callable[[Before, torch.Generator], Sent]


@dataclass(frozen=True)
class Acting:
    """How an active server acts: `craft` (`Attack.crafted`), and the fields of its `Before`."""

    craft: Craft
    target: int | None = None
    public: Data | None = None


def acting_round(drive: Drive, cohort: Sequence[int], acting: Acting, generator: torch.Generator) -> Round:
    """Return a round of `drive` that begins with crafted weights; the recorded states are of the target's version.

    UsageError: weights of another architecture, or not finite.
    """
    server = drive.parties.server
    before = Before(drive.plan, drive.defense, server, tuple(cohort), acting.target, acting.public)
    crafted = acting.craft(before, generator)
    chosen = replace(server, params=matching_params(crafted.params, server.params))
    drive.parties.server = chosen
    if crafted.others is None or acting.target is None:
        return drive.begin(cohort)
    drive.parties.server = replace(server, params=matching_params(crafted.others, server.params))
    rest = drive.unrecorded(cohort)
    drive.parties.server = chosen
    return _inconsistent(drive.begin(cohort), rest, acting.target)


def _inconsistent(target_round: Round, other_round: Round, target: int) -> Round:
    """Merge two rounds: the target gets the messages of the first, all others of the second; both get all answers."""
    answers: Mapping[int, Tree] | None = None
    while True:
        try:
            step = target_round.send(answers)  # type: ignore[arg-type]  # None starts a coroutine
        except StopIteration as stop:
            server: Server = stop.value
            return server
        other_step = other_round.send(answers)  # type: ignore[arg-type]
        out = {client: step.out[client] if client == target else other_step.out[client] for client in step.out}
        answers = yield Step(step.server, out)


def matching_params(params: Params, like: Params) -> Params:
    """Return `params` in the dtypes and on the device of `like`; UsageError: other names or shapes, or not finite."""
    if {n: p.shape for n, p in params.items()} != {n: p.shape for n, p in like.items()}:
        raise UsageError("A server that acts must send weights of the agreed architecture: equal names and shapes.")
    if not finite(params):
        raise UsageError("A server that acts must send finite weights: a client would not train on others.")
    return {name: params[name].detach().to(value) for name, value in like.items()}
