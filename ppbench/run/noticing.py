"""Whether clients behave differently in a probe and in training: a defense that detects the measurement.

A probe must differ from a round of training in whose examples it uses, and how many. A defense that inspects these can
protect the probe alone. In training it then sends undefended updates. The harness has the clients' examples and draws,
so it can compute those updates and compare.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

import torch

from ppbench.adversary.replay import replayed_evidence
from ppbench.base.errors import Overflow
from ppbench.base.tree import Params, moved, tree_map
from ppbench.federation.contract import Defense
from ppbench.federation.drive import party_context
from ppbench.federation.engine import Federation
from ppbench.federation.evidence import as_gradient
from ppbench.federation.messages import Model
from ppbench.federation.plan import Context, Data
from ppbench.federation.threats import HONEST_SERVER
from ppbench.federation.view import Transcript
from ppbench.federation.wire import Slot, session_of
from ppbench.records.schema import Flag

UNDEFENDED_DISTANCE = 0.01
"""Relative distance from an undefended update up to which a round of training counts as undefended."""
DEFENDED_DISTANCE = 0.1
"""Relative distance above which a probe counts as defended."""


def probe_flags(fed: Federation, probed: Transcript, victims: Mapping[Slot, Data]) -> tuple[Flag, ...]:
    """Return a flag if the server's steps are undefended in training but not in the probes, else ().

    Distances are medians over clients, of the update that the server's own code reads (`replayed_evidence`) to what a
    client without a defense computes from the same examples, weights and draws. No flag where the code reads no single
    client.
    """
    probe = distance(fed, probed, victims)
    if probe is None or probe <= DEFENDED_DISTANCE:
        return ()
    try:
        observed = fed.observe()
    except Overflow:  # the next uploads overflow: nothing to compare with
        return ()
    training = distance(fed, observed, {Slot(-1, client): data for client, data in fed.shards.items()})
    if training is None or training > UNDEFENDED_DISTANCE:
        return ()
    detail = (
        f"in training the server's steps are those of no defense (relative distance {training:.2g}), in the probes "
        f"they are not ({probe:.2g}): what the attacks are shown is not what clients send"
    )
    return (Flag(code="probe_noticed", severity="warning", detail=detail),)


def distance(fed: Federation, transcript: Transcript, data: Mapping[Slot, Data]) -> float | None:
    """Return the median relative distance of clients' updates from undefended ones; None if none can be read."""
    view, distances = transcript.view(HONEST_SERVER), []
    steps = {exchange.slot: exchange.step for exchange in reversed([*view.exchanges()])}
    for evidence in replayed_evidence(view):
        if len(evidence.unit) > 1 or evidence.measure != "squares" or evidence.params is None:
            continue
        (slot,), scale = evidence.unit, as_gradient(transcript.plan, fed.round + 1)
        draws = party_context(
            fed.seeds, transcript.plan, session_of(slot.probe), fed.round + 1, steps[slot], slot.client
        )
        plain = _undefended(draws, evidence.params, moved(data[slot], fed.device))
        apart = {name: scale * value - plain[name].double() for name, value in evidence.observed.items()}
        distances.append(_norm(apart) / max(_norm(plain), 1e-30))
    return median(distances) if distances else None


def _undefended(ctx: Context, params: Params, data: Data) -> Params:
    """Return the update of a client without a defense, from the same draws."""
    none = Defense()
    job = none.prepare(ctx, (), Model(params), data)
    assert job is not None  # weights were sent
    return tree_map(lambda value: value.detach(), none.compute(ctx.plan, job))


def _norm(update: Params) -> float:
    return float(torch.stack([value.double().norm() for value in update.values()]).norm())
