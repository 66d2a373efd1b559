"""Weight transmission: the model travels from client to client through the server (Phong and Phuong 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from ppbench.defenses.cao2022 import claims
from ppbench.federation.contract import Claim, Context, Defense, Round, Server


@dataclass(frozen=True)
class Phong(Defense):
    """Sequential training: each client trains the model that the client before it handed back.

    A round is one pass over the clients: the model down, and what training changed in it up, 2 V bytes a client of a
    model of V bytes. The server takes the whole change, so that its model is the client's own. It relays every model,
    so it sees each client's update as under FedAvg: the links are encrypted, and nothing is kept from the server.

    Where clients upload single gradients (a gradient plan or probe) there is no trained model to hand on; they upload
    as the plan's schedule has it.
    """

    name: ClassVar[str] = "phong"
    paper: ClassVar[str] = (
        "Phong and Phuong, Privacy-Preserving Deep Learning via Weight Transmission, IEEE Transactions on Information "
        "Forensics and Security 14(11), 2019"
    )
    claimed: ClassVar[tuple[Claim, ...]] = claims("phong")
    epsilon_reason: ClassVar[str] = "the server relays every client's model as it is"

    def round(self, ctx: Context, server: Server, cohort: Sequence[int]) -> Round:
        """Run one pass over the clients, in order."""
        if ctx.plan.local.upload == "delta":
            ctx = replace(ctx, plan=replace(ctx.plan, schedule="round_robin"))
        return super().round(ctx, server, cohort)
