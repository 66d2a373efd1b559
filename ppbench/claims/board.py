"""What a board shows of papers' claims: the claim beside a record, and what became of each."""

from __future__ import annotations

from collections.abc import Sequence

from ppbench.claims.case import data_of
from ppbench.claims.check import Checked, Unchecked, check_claims
from ppbench.claims.claim import allowed
from ppbench.claims.lookup import claims_of
from ppbench.records.schema import Record
from ppbench.report.page.profiles import PaperClaims

CLAIM_FORMS = {
    ("membership", "iterate"): {"asr": "ASR {:.1%}"},
    ("reconstruction", "init"): {"psnr_median": "PSNR {:.2f} dB"},
}
"""By kind and stage of a cell: the metric that a comparable claim has, except CAP, and its form."""


def claimed(record: Record) -> str:
    """Return the claim of the defense's paper for this very setting, as "CAP 0.69 (Table 8)", or ""."""
    config = record.config
    forms = CLAIM_FORMS.get((config.attack.kind, config.stage), {}) | {f"cap_{config.attack.kind}": "CAP {:.2f}"}
    for claim in claims_of(config.defense.id):
        fits = (
            claim.metric in forms
            and claim.dataset == data_of(config)
            and claim.model == config.model.id
            and claim.batch in (None, config.batch_size)
            and all(config.defense.parameters.get(name) in allowed(value) for name, value in claim.when)
            and claim.than is None
        )
        if fits and claim.value is not None:
            return f"{forms[claim.metric].format(claim.value)} ({claim.source})"
    return ""


def outcomes_of(records: Sequence[Record]) -> list[Checked | Unchecked]:
    """Return the outcomes of the claims of all defenses in `records`."""
    names = sorted({record.config.defense.id for record in records})
    return check_claims({name: claims for name in names if (claims := claims_of(name))}, records, ())


PAPER_CLAIMS = PaperClaims(claimed, outcomes_of)
"""What every board of ppbench shows."""
