"""A server that acts: before a round it puts weights of its own in the place of the model's, and sees what comes.

The clients' code, the defense's server code and all secrets are as ever; only the weights that the round begins with
are chosen, of the agreed architecture. Where one client gets others than the rest (model inconsistency, Pasquini et
al., CCS 2022), the defense's own round runs once for each version, from equal draws: so masks, sessions and secrets are
those of one round. Each client is sent the message of its version, and every version is told all answers.
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
    """What a server has when it decides what to send; nobody's data, and no client's secret.

    plan: of the round to come, whose `local.batch` bounds the examples of a gradient; server: its whole state; cohort:
    who takes part; target: the client that it is after, None for all of them; public: examples that no client holds.
    """

    plan: Plan
    defense: Defense
    server: Server
    cohort: tuple[int, ...]
    target: int | None
    public: Data | None


@dataclass(frozen=True)
class Sent:
    """Weights to send. params: to the target, or to all; others: to all but the target; None for the same."""

    params: Params
    others: Params | None = None


Craft = Callable[[Before, torch.Generator], Sent]


@dataclass(frozen=True)
class Acting:
    """How a server acts: `craft` (`Attack.crafted`), and what goes into its `Before`."""

    craft: Craft
    target: int | None = None
    public: Data | None = None


def acted(drive: Drive, cohort: Sequence[int], acting: Acting, generator: torch.Generator) -> Round:
    """Return the round of `drive` as a server begins it that acts; the states kept are those of the target's version.

    UsageError: weights of another architecture, or not finite.
    """
    server = drive.parties.server
    before = Before(drive.plan, drive.defense, server, tuple(cohort), acting.target, acting.public)
    sent = acting.craft(before, generator)
    chosen = replace(server, params=agreed(sent.params, server.params))
    drive.parties.server = chosen
    if sent.others is None or acting.target is None:
        return drive.begin(cohort)
    drive.parties.server = replace(server, params=agreed(sent.others, server.params))
    rest = drive.unkept(cohort)
    drive.parties.server = chosen
    return _inconsistent(drive.begin(cohort), rest, acting.target)


def _inconsistent(mine: Round, rest: Round, target: int) -> Round:
    """Return `mine`, whose messages to all but the target are those of `rest`; both are told all answers."""
    answers: Mapping[int, Tree] | None = None
    while True:
        try:
            asked = mine.send(answers)  # type: ignore[arg-type]  # None starts a coroutine
        except StopIteration as stop:
            server: Server = stop.value
            return server
        others = rest.send(answers)  # type: ignore[arg-type]
        out = {client: asked.out[client] if client == target else others.out[client] for client in asked.out}
        answers = yield Step(asked.server, out)


def agreed(params: Params, like: Params) -> Params:
    """Return weights in the dtype and on the device of the model's; UsageError unless names and shapes are its."""
    if {n: p.shape for n, p in params.items()} != {n: p.shape for n, p in like.items()}:
        raise UsageError("A server that acts must send weights of the agreed architecture: equal names and shapes.")
    if not finite(params):
        raise UsageError("A server that acts must send finite weights: a client would not train on others.")
    return {name: params[name].detach().to(value) for name, value in like.items()}
