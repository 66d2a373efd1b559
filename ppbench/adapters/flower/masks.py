"""Removes the masks from a client's upload under SecAgg+, as colluders can: the pairwise masks and the private one.

The server receives shares of the private mask's seed in the last stage, as the protocol has it. Pairwise masks cancel
in the sum; the other client of a pair knows its mask.
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
from ppbench.adapters.flower.records import record_dict
from ppbench.federation.view import Exchange, View

SETTINGS_RECORD = flower.RECORD_KEY_CONFIGS


def _settings(tree: Any, key: str = SETTINGS_RECORD) -> Mapping[str, Any]:
    """Return the settings in a message or a client's state."""
    settings: Mapping[str, Any] = record_dict(tree)[key]
    return settings


def stage_of(exchange: Exchange) -> str:
    """Return the protocol stage of an exchange."""
    return str(_settings(exchange.request.rest)[flower.Key.STAGE])


def bare_weights(view: View, target: Exchange, clipping: float, levels: int, modulus: int) -> list[Tensor] | None:
    """Return the weights in a masked upload, float64, in the model's order; None: the view lacks a mask's key.

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
    """Yield the sign and the seed of every mask on a client's upload; seed None: the view lacks its key."""
    node, nodes = node_of(target.slot.client), {node_of(c): c for c in range(view.plan.clients)}
    exchanges = [e for e in view.exchanges() if e.slot.probe == target.slot.probe and e.round == target.round]
    shares: list[bytes] = []
    for one in exchanges:
        settings = _settings(one.answer.rest)
        if stage_of(one) == flower.Stage.UNMASK:
            shares += [
                s
                for n, s in zip(settings[flower.Key.NODE_ID_LIST], settings[flower.Key.SHARE_LIST], strict=True)
                if n == node
            ]
    yield -1, flower.combine_shares(shares) if shares else None
    keys = next(e for e in exchanges if e.slot == target.slot and stage_of(e) == flower.Stage.SHARE_KEYS)
    public = {int(n): pair for n, pair in _settings(keys.request.rest).items() if n.isdigit()}
    for neighbour in {*public} - {node}:
        state = view.state_at(target, nodes[neighbour])
        seed = None
        if state is not None:
            own = _settings(state.state, RECORD_KEY_STATE)["sk1"]
            pair = flower.bytes_to_private_key(own), flower.bytes_to_public_key(public[node][0])
            seed = flower.generate_shared_key(*pair)
        yield (-1 if node > neighbour else 1), seed
