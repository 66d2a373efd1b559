"""The attacks' input in an audit: views of the target, and challenges with references."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from ppbench.adversary.attack import Challenge, References
from ppbench.adversary.victims import Candidates
from ppbench.federation.threats import ThreatModel, threat_model
from ppbench.federation.view import View
from ppbench.records.schema import Flag
from ppbench.run.audit.clients import CanaryClients
from ppbench.run.audit.population import ADVERSARY
from ppbench.run.audit.rounds import load_recorded
from ppbench.run.audit.runs import PointAudit, Refused

PUBLIC_REFERENCES = "the reference runs were trained on public examples and the kept candidates"
SAME_BASE_REFERENCES = (
    "the reference runs were trained on the target's own other records and the kept candidates: the adversary knows all"
)


@dataclass(frozen=True)
class Questions:
    """The questions of an audit that is complete."""

    audit: PointAudit

    @property
    def candidates(self) -> Candidates:
        """The truth about the candidates, for the scorer."""
        return self.audit.population.candidates

    @property
    def clients(self) -> CanaryClients:
        """The canary clients, with the truth about them. Raises Refused: there are none."""
        return self.audit.clients

    def view(self, threat: ThreatModel | str) -> View:
        """Return the view of `threat`: a client's is the delivered model, others add the mail of all kept rounds.

        Raises Refused: the view of other clients than the audit's own, whose states are not kept.
        """
        audit, threat = self.audit, threat_model(threat)
        if any(threat.has(client) for client in range(audit.experiment.config.clients) if client != ADVERSARY):
            raise Refused(f"An audit keeps no clients' states, so it has no view of {threat}; leave it out.")
        fed = audit.restore()
        if not threat.sees_uploads:
            transcript = fed.release()
            view = transcript.view(threat, own=((-1, audit.population.shards(0)[ADVERSARY]),))
        else:
            view = load_recorded(fed, audit.target_folder / "rounds.safetensors").view(threat)
        return replace(view, public=audit.experiment.task.public)

    @cached_property
    def references(self) -> tuple[References | None, int]:
        """The reference runs, or None, and how many were left out: each that diverged, with its complement."""
        all_answers, population = self.audit.answers(), self.audit.population
        if not all_answers:
            return None, 0
        pairs = all_answers["finished"].view(-1, 2).all(1).repeat_interleave(2)
        dropped = int((~pairs).sum())
        if not pairs.any():
            return None, dropped
        keep = population.keep[1:][pairs]
        outputs, answers = all_answers["outputs"][pairs], all_answers["population"][pairs]
        others = population.others
        return References(keep, outputs, others.y.clone(), others.x.clone(), answers), dropped

    def challenges(self) -> list[Challenge]:
        """Return the membership questions about either half, with the references."""
        references, _ = self.references
        return [self.candidates.challenge(half, references) for half in (0, 1)]

    def tracing(self) -> tuple[Challenge, Tensor]:
        """Return the question of who holds each member, and the owners, for the scorer."""
        return self.audit.population.tracing()

    def flags(self) -> tuple[Flag, ...]:
        """Return what a reader must know about the audit."""
        audit, config, flags = self.audit, self.audit.experiment.config, []
        references, dropped = self.references
        if references is not None:
            code, detail = (
                ("references_public", PUBLIC_REFERENCES)
                if audit.population.public
                else ("references_same_base", SAME_BASE_REFERENCES)
            )
            flags.append(Flag(code=code, severity="info", detail=detail))
        if dropped:
            detail = f"{dropped} of {config.references} reference runs were left out: they or their pairs diverged"
            flags.append(Flag(code="references_diverged", severity="warning", detail=detail))
        target = audit.target
        if target is not None and 0 < len(target.rounds) < config.rounds:
            detail = f"the mail of {len(target.rounds)} evenly spaced rounds of {config.rounds} was kept"
            flags.append(Flag(code="rounds_thinned", severity="info", detail=detail))
        if config.canary_clients:
            detail = f"{config.canary_clients} clients whose gradients are random directions took part in the target"
            flags.append(Flag(code="canary_clients", severity="info", detail=detail))
        return tuple(flags)
