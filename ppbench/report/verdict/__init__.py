"""The verdicts on a defense, in sentences computed from records, for the terminal and the head of the board."""

from __future__ import annotations

from collections.abc import Sequence

from ppbench.metrics.epsilon import VACUOUS, epsilon_words
from ppbench.questions.base import questions
from ppbench.records.schema import Record
from ppbench.report.findings import Verdict, findings_of, refutation_of
from ppbench.report.frame import TRAINED, frame_of
from ppbench.report.knowing import Knowledge
from ppbench.report.learning import learning_of
from ppbench.report.verdict.models import audit_verdicts, model_verdicts, secret_verdicts
from ppbench.report.verdict.uploads import upload_verdicts
from ppbench.report.words import capitalized, listed_values, setting_labels

MOST_DIFFERING_WORDS = 3  # words in which reasons may differ and still be joined into one


def verdicts(defense: str, records: Sequence[Record], known: Knowledge | None = None) -> list[Verdict]:
    """Return the verdicts on `defense`, question by question; every figure is a record's.

    known: which attacks know a defense, by default as `records` show.
    """
    frame = frame_of(records)
    known = Knowledge.of(frame) if known is None else known
    findings = [one for one in findings_of(frame) if one.row.key.defense == defense]
    results = upload_verdicts(defense, frame, known, findings)
    results += [*model_verdicts(defense, frame, findings), *audit_verdicts(defense, frame, findings)]
    results += secret_verdicts(findings)
    for name, question in questions().items():
        own = [] if question.chapter else [r for r in frame if r.config.attack.kind == name]
        results += [Verdict(defense, name, None, sentence) for sentence in question.sentences(defense, own)]
    results += _guarantees(defense, [r for r in frame if r.config.defense.id == defense])
    learned = next((learning_of(r.utility) for r in frame if r.config.defense.id == "none"), None)
    if defense == "none" or learned is None or learned.suffices:
        return results
    sentence = f"{capitalized(learned.clause)}, so no setting can be called usable."
    return [*results, Verdict(defense, "usability", None, sentence)]


def sentences(defense: str, records: Sequence[Record]) -> list[str]:
    """Return the sentences of `verdicts`."""
    return [verdict.sentence for verdict in verdicts(defense, records)]


def _guarantees(defense: str, records: Sequence[Record]) -> list[Verdict]:
    """Return what one defense guarantees, by `Record.privacy`; reasons are joined over control values.

    A refuted guarantee falls.
    """
    label = setting_labels(records)
    stated, refuted = _stated(records, label)
    verdicts = [Verdict(defense, "guarantee", None, sentence) for sentence in stated]
    verdicts += [Verdict(defense, "guarantee", "falls", sentence) for sentence in refuted]
    reasons: dict[str, list[str]] = {}
    values_of = {r.cell_id: 0.0 if (c := r.config.defense.control) is None else c.value for r in records}
    for record in sorted(records, key=lambda r: (values_of[r.cell_id], r.cell_id)):
        reason = (record.privacy.reason or "").strip().rstrip(".")
        if record.privacy.epsilon is None and reason:
            reasons.setdefault(reason, []).append(label[record.cell_id])
    if not reasons:
        return verdicts
    places = {reason: list(dict.fromkeys(at)) for reason, at in reasons.items()}
    known = list(dict.fromkeys(word for at in places.values() for word in at))
    where = f" at {listed_values(known)}" if verdicts and known != [""] else ""
    return [*verdicts, Verdict(defense, "guarantee", None, f"No epsilon can be given{where}: {_clauses(places)}.")]


def _stated(records: Sequence[Record], label: dict[str, str]) -> tuple[list[str], list[str]]:
    """Return sentences on the stated epsilons, and on refuted ones; label: words of the setting, by cell."""
    refuted: list[str] = []
    bounds: list[float] = []
    vacuous: dict[str, float] = {}
    for some in frame_of(records).by(TRAINED).values():
        stated, refutation, at = some[0].privacy.epsilon, refutation_of(some), label[some[0].cell_id]
        if refutation is not None:
            where = f" at {at}" if at else ""
            refuted.append(f"The stated epsilon {stated:.3g}{where} is refuted: {refutation.words}.")
        elif stated is not None and stated > VACUOUS:
            vacuous[at] = max(stated, vacuous.get(at, 0.0))
        elif stated is not None:
            bounds.append(stated)
    span = " to ".join(f"{end:.3g}" for end in dict.fromkeys((min(bounds), max(bounds)))) if bounds else ""
    formal = [f"Formal guarantee over the whole training: epsilon {span} for a single example."] if bounds else []
    words = [f"{epsilon_words(stated)}{f' at {at}' if at else ''}" for at, stated in vacuous.items()]
    none = [f"There is {', '.join(words)}."] if words else []
    return [*formal, *none], refuted


def _clauses(reasons: dict[str, list[str]]) -> str:
    """Return joined reasons: "epsilon 1 / 3 is claimed" where numbers differ, else shared clauses, then the rest."""
    words = [reason.split(" ") for reason in reasons]
    if len({len(some) for some in words}) == 1:
        places = [list(dict.fromkeys(place)) for place in zip(*words, strict=True)]
        if sum(len(place) > 1 for place in places) <= MOST_DIFFERING_WORDS:
            return " ".join(" / ".join(place) for place in places)
    split = {reason: reason.split("; ") for reason in reasons}
    common = [c for c in next(iter(split.values())) if all(c in clauses for clauses in split.values())]
    own = []
    for reason, clauses in split.items():
        rest = "; ".join(clause for clause in clauses if clause not in common)
        if rest:
            own.append(f"{listed_values(reasons[reason])}: {rest}" if reasons[reason] != [""] else rest)
    return "; ".join([*common, *own])
