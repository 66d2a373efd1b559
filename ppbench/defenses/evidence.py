"""Colluders' unmasking of uploads, for the evidence of several defenses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ppbench.base.tree import Tree
from ppbench.federation import secagg
from ppbench.federation.contract import Context
from ppbench.federation.view import Exchange, View


def others_masks(
    view: View, exchange: Exchange, among: Sequence[int], keys_of: Callable[[Tree], Tree], purpose: str, words: int
) -> Tensor | None:
    """Return the sum [words] int64 of the other clients' masks; added to a client's masked upload it unmasks it.

    None if `view` lacks the keys (`keys_of` a client's state) of one of `among`, the clients whose masks cancel.
    """
    total, session = torch.zeros(words, dtype=torch.int64), view.session(exchange)
    others = [client for client in among if client != exchange.slot.client]
    for other in others:
        state = view.state_at(exchange, other)
        if state is None:
            return None
        ctx = Context(view.plan, exchange.round, session, other, torch.Generator())
        total = total + secagg.zero_sum(keys_of(state), ctx, purpose, words)
    return total if others else None
