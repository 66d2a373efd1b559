"""What colluders take off a client's upload under SecAgg+: the masks of pairs, by their own keys, and its private one.

The server is told the seed of the private mask in the last stage, as the protocol has it; the masks of pairs cancel in
the sum, and who holds a pair's other key knows its mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from flwr.client.mod.secure_aggregation.secaggplus_mod import RECORD_KEY_STATE
from flwr.server.workflow.secure_aggregation import secaggplus_workflow as flower
from torch import Tensor

from ppbench.adapters.flower.inside import node_of
from ppbench.adapters.flower.records import records
from ppbench.federation.view import Exchange, View

KEY = flower.RECORD_KEY_CONFIGS


def _settings(tree: Any, key: str = KEY) -> Mapping[str, Any]:
    """Return the settings in a message or a client's state."""
    found: Mapping[str, Any] = records(tree)[key]
    return found


def stage_of(exchange: Exchange) -> str:
    """Return the stage that a message asks for."""
    return str(_settings(exchange.asked.rest)[flower.Key.STAGE])


def bare_weights(view: View, target: Exchange, clipping: float, levels: int, modulus: int) -> list[Tensor] | None:
    """Return the weights that a masked upload holds, float64, in the model's order; None: a mask's key is not known.

    clipping, levels, modulus: the workflow's ranges.
    """
    masked = [flower.bytes_to_ndarray(one) for one in _settings(target.answer.rest)[flower.Key.MASKED_PARAMETERS]]
    shapes = [one.shape for one in masked]
    for sign, seed in _seeds(view, target):
        if seed is None:
            return None
        masked = [a + sign * b for a, b in zip(masked, flower.pseudo_rand_gen(seed, modulus, shapes), strict=True)]
    factor, values = flower.factor_extract([one % modulus for one in masked])
    weights = flower.dequantize(values, clipping, levels)
    return [torch.from_numpy(np.asarray(one) * (levels / factor)) for one in weights]


def _seeds(view: View, target: Exchange) -> Iterator[tuple[int, bytes | None]]:
    """Yield the sign and the seed of every mask on a client's upload; no seed: nobody here has its key."""
    mine, nodes = node_of(target.slot.client), {node_of(c): c for c in range(view.plan.clients)}
    mates = [e for e in view.exchanges() if e.slot.probe == target.slot.probe and e.round == target.round]
    shares: list[bytes] = []
    for one in mates:
        told = _settings(one.answer.rest)
        if stage_of(one) == flower.Stage.UNMASK:
            shares += [
                s for n, s in zip(told[flower.Key.NODE_ID_LIST], told[flower.Key.SHARE_LIST], strict=True) if n == mine
            ]
    yield -1, flower.combine_shares(shares) if shares else None
    keys = next(e for e in mates if e.slot == target.slot and stage_of(e) == flower.Stage.SHARE_KEYS)
    public = {int(n): pair for n, pair in _settings(keys.asked.rest).items() if n.isdigit()}
    for neighbour in {*public} - {mine}:
        state = view.state_at(target, nodes[neighbour])
        seed = None
        if state is not None:
            own = _settings(state.state, RECORD_KEY_STATE)["sk1"]
            pair = flower.bytes_to_private_key(own), flower.bytes_to_public_key(public[mine][0])
            seed = flower.generate_shared_key(*pair)
        yield (-1 if mine > neighbour else 1), seed
