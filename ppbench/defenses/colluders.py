"""What clients that collude with the server can say of masks: those of all clients cancel, so theirs tell the last."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ppbench.federation import secagg
from ppbench.federation.contract import Context
from ppbench.federation.view import Exchange, View
from ppbench.federation.wire import session_of


def others_masks(view: View, exchange: Exchange, keys: Mapping[int, secagg.Keys], purpose: str, words: int) -> Tensor:
    """Return the sum [words] int64 of the colluders' masks: what a client's masked upload lacks to be bare.

    Args:
        view: of the colluding parties.
        exchange: the client's upload, and when.
        keys: those of ALL others whose masks cancel with the client's, by client.
        purpose: of the masks' derivation.
        words: numbers in the upload.
    """
    total, session = torch.zeros(words, dtype=torch.int64), session_of(exchange.slot.probe)
    for other, known in keys.items():
        ctx = Context(view.plan, exchange.round, session, other, torch.Generator())
        total = total + secagg.zero_sum(known, ctx, purpose, words)
    return total
