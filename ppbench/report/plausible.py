"""Contradictions within a record; no other file is read."""

from __future__ import annotations

from collections.abc import Iterator

from ppbench.base.errors import UsageError
from ppbench.base.registry import load
from ppbench.federation.contract import Defense
from ppbench.federation.threats import THREATS
from ppbench.metrics.intervals import clopper_pearson
from ppbench.questions.base import question_for
from ppbench.records.schema import Record, Utility

SHARE_PRECISION = 1e-9


def implausible(record: Record) -> Iterator[str]:
    """Yield a clause for each contradiction between parts of a record, metrics excepted."""
    yield from _configuration(record)
    yield from _outcome(record)
    yield from _privacy(record)
    yield from _utility(record)
    yield from _curve(record)
    yield from question_for(record).flawed(record)


def _configuration(record: Record) -> Iterator[str]:
    config, axis = record.config, record.config.defense.control
    threat, adaptive = config.threat_model, config.attack.adaptive
    known = THREATS.get(threat.id)
    if known is not None and threat.sees != known.sees:
        yield f"threat model {known} sees {threat.sees!r}, not {known.sees!r}"
    if adaptive != threat.knows_defense:
        yield f"its attack is {'' if adaptive else 'not '}adaptive where the threat model says the opposite"
    stated = None if axis is None else config.defense.parameters.get(axis.name)
    if axis is not None and (not isinstance(stated, int | float) or stated != axis.value):
        yield f"its control {axis.name} is {axis.value}, its defense's parameter {stated}"
    tuned = record.tuned
    if tuned is not None and tuned.scores.index(max(tuned.scores)) != tuned.chosen:
        yield f"tuned.chosen is {tuned.chosen}, variant {tuned.scores.index(max(tuned.scores))} gave most"


def _outcome(record: Record) -> Iterator[str]:
    if (record.status == "complete") != (record.reason is None):
        yield f"status {record.status!r} has reason {record.reason!r}; only what is not complete has one"
    if record.status == "complete" and not record.victims:
        yield "status 'complete' without any victim's score"
    if record.status != "complete" and (record.victims or record.artifacts):
        yield f"status {record.status!r} with scores or reconstructions; only a complete cell has any"
    places = [score.place for score in record.victims]
    if len(set(places)) < len(places):
        yield "a victim is scored twice"


def _privacy(record: Record) -> Iterator[str]:
    privacy = record.privacy
    if len({part is None for part in (privacy.epsilon, privacy.delta)}) > 1:
        yield f"privacy has epsilon {privacy.epsilon} with delta {privacy.delta}; it has both or none"
    if (privacy.epsilon is None) == (privacy.reason is None):
        yield f"privacy.epsilon is {privacy.epsilon} with reason {privacy.reason!r}; only a missing one has a reason"


def _utility(record: Record) -> Iterator[str]:
    utility = record.utility
    if utility.accuracy is None:
        if utility.reason is None:
            yield "utility.accuracy is null without a reason"
        return
    if utility.dice is not None:  # intervals of masks resample images, which a record does not keep
        for name in ("accuracy", "dice"):
            value, low, high = utility.figure(name)
            ascending = [0.0, *(end for end in (low, value, high) if end is not None), 1.0]
            if ascending != sorted(ascending):
                yield f"utility.{name} and its interval {(low, value, high)} are not in order within [0, 1]"
        return
    hits = round(utility.accuracy * utility.n)
    if utility.n < 1 or not 0 <= hits <= utility.n or not _is_share(utility, record):
        yield f"utility.accuracy {utility.accuracy} is no share of {utility.n} test examples"
        return
    interval = clopper_pearson(hits, utility.n)
    for name in ("low", "high"):
        stated, expected = getattr(utility, name), getattr(interval, name)
        if stated is None or expected is None or abs(stated - expected) > SHARE_PRECISION:
            yield f"utility.{name} is {stated}, {hits} of {utility.n} give {expected}"


def _is_share(utility: Utility, record: Record) -> bool:
    """Return whether accuracy is a share of the test examples, or a mean of shares where clients keep own models."""
    accuracy, n = utility.accuracy or 0.0, utility.n
    counts = (n, n * record.config.federation.clients) if _keep_own(record.config.defense.id) else (n,)
    return any(abs(round(accuracy * count) / count - accuracy) <= SHARE_PRECISION for count in counts)


def _keep_own(defense: str) -> bool:
    """Return whether clients end with models of their own, according to the installed defense."""
    try:
        return bool(load("defenses", defense).own_models is not Defense.own_models)
    except UsageError:  # not installed, or broken
        return False


def _curve(record: Record) -> Iterator[str]:
    utility, config = record.utility, record.config
    if utility.n != config.data.test:
        yield f"utility.n is {utility.n}, the data set has {config.data.test} test examples"
    if utility.dice is None and abs(utility.chance - 1 / config.model.classes) > SHARE_PRECISION:
        yield f"utility.chance is {utility.chance}, {config.model.classes} classes give {1 / config.model.classes}"
    rounds = [number for number, _ in utility.curve]
    if rounds != sorted(set(rounds)) or any(not 1 <= number <= config.federation.rounds for number in rounds):
        yield f"utility.curve is at rounds {rounds}, which do not ascend from 1 to {config.federation.rounds}"
    last = utility.curve[-1][1] if utility.curve else None
    if utility.accuracy is not None and utility.dice is None and last != utility.accuracy:
        yield f"utility.accuracy is {utility.accuracy}, its curve ends at {last}"
