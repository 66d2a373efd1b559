"""Whether clients do something else in a probe than in training: a defense that notices the measurement.

A probe differs from a round of training in what it must: whose examples they are, and how many. Code that looks at
these can protect the probe alone. What it sends in training then is what no defense sends, and that can be told: the
harness has the clients' examples and draws, and computes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

import torch

from ppbench.adversary.replay import replayed
from ppbench.base.errors import Overflow
from ppbench.base.tree import Params, moved, tree_map
from ppbench.federation.contract import Defense
from ppbench.federation.drive import context
from ppbench.federation.engine import Federation
from ppbench.federation.evidence import as_gradient
from ppbench.federation.messages import Model
from ppbench.federation.plan import Context, Data
from ppbench.federation.threats import HONEST_SERVER
from ppbench.federation.view import Transcript
from ppbench.federation.wire import Slot, session_of
from ppbench.records.schema import Flag

SAME = 0.01
"""Relative distance from an undefended update up to which a round of training counts as undefended."""
OTHER = 0.1
"""Distance from which on a probe does not."""


def noticed(fed: Federation, probed: Transcript, victims: Mapping[Slot, Data]) -> tuple[Flag, ...]:
    """Return a flag where the server's steps are those of no defense in training, and others in the probes.

    Distances are medians over clients, of the update that the server's own code reads (`replayed`) to what a client
    without a defense computes of the same examples, weights and draws; nothing is said where it reads no single client.
    """
    probe = distance(fed, probed, victims)
    if probe is None or probe <= OTHER:
        return ()
    try:
        observed = fed.observe()
    except Overflow:  # what clients would send next is in no range: nothing to compare with
        return ()
    training = distance(fed, observed, {Slot(-1, client): data for client, data in fed.shards.items()})
    if training is None or training > SAME:
        return ()
    detail = (
        f"in training the server's steps are those of no defense (relative distance {training:.2g}), in the probes "
        f"they are not ({probe:.2g}): what the attacks are shown is not what clients send"
    )
    return (Flag(code="probe_noticed", severity="warning", detail=detail),)


def distance(fed: Federation, transcript: Transcript, data: Mapping[Slot, Data]) -> float | None:
    """Return the median relative distance of clients' updates from undefended ones, None where none can be read."""
    view, found = transcript.view(HONEST_SERVER), []
    steps = {exchange.slot: exchange.step for exchange in reversed([*view.exchanges()])}
    for evidence in replayed(view):
        if len(evidence.unit) > 1 or evidence.measure != "squares" or evidence.params is None:
            continue
        (slot,), scale = evidence.unit, as_gradient(transcript.plan, fed.round + 1)
        draws = context(fed.seeds, transcript.plan, session_of(slot.probe), fed.round + 1, steps[slot], slot.client)
        plain = _undefended(draws, evidence.params, moved(data[slot], fed.device))
        apart = {name: scale * value - plain[name].double() for name, value in evidence.observed.items()}
        found.append(_norm(apart) / max(_norm(plain), 1e-30))
    return median(found) if found else None


def _undefended(ctx: Context, params: Params, data: Data) -> Params:
    """Return what a client without a defense sends in the same place, by the same draws."""
    none = Defense()
    job = none.prepare(ctx, (), Model(params), data)
    assert job is not None  # weights were sent
    return tree_map(lambda value: value.detach(), none.compute(ctx.plan, job))


def _norm(update: Params) -> float:
    return float(torch.stack([value.double().norm() for value in update.values()]).norm())
