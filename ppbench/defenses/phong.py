"""Weight transmission: the model travels from client to client through the server (Phong and Phuong 2019)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ppbench.defenses.claims import paper
from ppbench.defenses.fedpc.parameters import FEDPC_PAPER
from ppbench.federation.contract import Claim, Context, Defense, Round, Server
from ppbench.federation.evidence import Evidence, Shared, as_gradient
from ppbench.federation.plain import client_observations
from ppbench.federation.plan import Plan
from ppbench.federation.view import View

CAO2022 = paper("cao2022")


@dataclass(frozen=True)
class Phong(Defense):
    """Sequential training: each client trains the model of the client before it, once per round.

    The server relays every model, so it sees each client's update as under FedAvg. If clients upload single gradients,
    there is no trained model to pass on; they then follow the plan's schedule.
    """

    name: ClassVar[str] = "phong"
    paper: ClassVar[str] = (
        "Phong and Phuong, Privacy-Preserving Deep Learning via Weight Transmission, IEEE Transactions on Information "
        "Forensics and Security 14(11), 2019"
    )
    claimed: ClassVar[tuple[Claim, ...]] = CAO2022.claims("phong")
    setting: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {**FEDPC_PAPER, "grid": "paper", "settings": {}}}
    epsilon_reason: ClassVar[str] = "the server relays every client's model as it is"

    def copies(self, plan: Plan, clients: int, examples: int) -> int:
        """As the base class; one client at a time if models are passed on."""
        return super().copies(plan, 1 if plan.local.upload == "delta" else clients, examples)

    def round(self, ctx: Context, server: Server, cohort: Sequence[int]) -> Round:
        """Run one pass over the clients, in order."""
        if ctx.plan.local.upload == "delta":
            ctx = replace(ctx, plan=replace(ctx.plan, schedule="round_robin"))
        return super().round(ctx, server, cohort)

    def evidence(self, view: View) -> list[Evidence]:
        """Return the plain evidence; of a client, what the others made of the model that it passed_on on."""
        if view.threat.sees_uploads or view.plan.local.upload == "gradient":
            return super().evidence(view)
        shared, pieces = Shared(view.plan), []
        for others, (own_upload, *more), first, second in client_observations(view):
            if more:  # colluders stand at several places of the pass
                continue
            change, divisor = (
                self.decode(own_upload.answer, first),
                len(others) * as_gradient(view.plan, own_upload.round),
            )
            passed_on = {name: value - change[name] for name, value in first.items()}
            observed = {name: (value - second[name]) / divisor for name, value in passed_on.items()}
            pieces.append(Evidence(others, observed, shared.at(passed_on), passed_on, channel="aggregate"))
        return pieces
