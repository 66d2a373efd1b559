"""Score submitted answers like our own cells, and decide whether a worst case moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load

from ppbench.adversary.attack import Attack, Guess
from ppbench.adversary.victims import Victims
from ppbench.base.blame import guard
from ppbench.base.errors import UsageError, because
from ppbench.base.files import kind_of
from ppbench.base.locks import locked
from ppbench.base.seeds import Seeds
from ppbench.federation.plan import Data
from ppbench.federation.wire import Slot
from ppbench.ledger.book import EXTERNAL, BookEntry, add_entry, counting_records, read_book, tries_at
from ppbench.ledger.dealt import permutation_p
from ppbench.ledger.form import TENSOR_BYTES, GuessAbout, Truth, parse_json, read_bounded, row_key, truth_commitment
from ppbench.ledger.guesses import read_guesses
from ppbench.ledger.judge import Decision, decide
from ppbench.ledger.transcript import FrozenView
from ppbench.metrics.perceptual import feature_network, measurable, weights_identity
from ppbench.metrics.recognition import Gallery
from ppbench.questions.base import question_for, question_of
from ppbench.questions.inquiry import Inquiry, Probe, Scored, Yardstick
from ppbench.records.aggregate import aggregate
from ppbench.records.schema import AttackInfo, CellConfig, Record
from ppbench.records.store import Store
from ppbench.report.worst import WorstCase, worst_case

PREFIX = "external:"
"""Prefix of the names of attacks that are known by their answers alone; no plugin has such a name."""


@dataclass(frozen=True)
class ExternalAttack(Attack):
    """Stands for an attack that is known by its answers alone and cannot be run: assumed to match the defense's own
    evidence."""

    name: ClassVar[str] = "external"
    kind: ClassVar[str] = ""
    reads_alone: ClassVar[bool] = False


@dataclass(frozen=True)
class ScoredSubmission:
    """The result of a submission: its record, the worst case before it, the decision."""

    about: GuessAbout
    scene: str
    record: Record
    before: WorstCase | None
    decision: Decision

    @property
    def receipt(self) -> str:
        """The message for the submitter: figures only if the row moved, to a tenth. More would reveal the truth."""
        d = self.decision
        if not d.moved:
            return f"try {d.tries}: not better than the worst case so far, at level {d.level:.2g}"
        was = "nothing" if d.before is None else f"{d.before:.1f}"
        return f"try {d.tries}: the worst case moves, {d.metric} from {was} to {d.after:.1f}"


@dataclass(frozen=True)
class OpenedTruth:
    """The organizer's half, opened. victims: of each question, in order; yardstick: None without further measures."""

    record: Record
    victims: Victims
    yardstick: Yardstick | None
    perceptual: str


def score(frozen: FrozenView, guesses: Path | str, truth: Path | str, weights: str | None = None) -> ScoredSubmission:
    """Score a file of guesses, keep its record in TRUTH/external and the decision in TRUTH's book.

    truth: the folder of results whose cells were published. weights: of AlexNet, for LPIPS. Raises UsageError: the
    guesses have a wrong form or were scored before, or the truth is another's; nothing is kept then.
    """
    home = Path(truth)
    if kind_of(home / EXTERNAL, follow=False) not in (None, "folder"):
        raise UsageError(f"{home / EXTERNAL} is no folder of its own, where records of guesses are kept; move it away.")
    about, answers, digest = read_guesses(guesses, frozen)
    known = open_truth(frozen, home, weights)
    with locked(home, "scoring"):
        book = read_book(home)
        for old in book:
            if (old.transcript, old.kind, old.guesses) == (about.transcript, about.kind, digest):
                raise UsageError(f"{guesses} was scored before, as try {old.tries} at this transcript; it counts once.")
        record, scored, blind = score_answers(frozen, known, about, answers, digest)
        before = standing_worst(counting_records(home, book), record)
        telling = partial(exchange_p, frozen, known, about.kind, answers)
        decision = decide(before, blind, record, tries_at(book, frozen.about.id) + 1, telling)
        Store(home / EXTERNAL).save(record, tensors=scored.images)
        add_entry(home, _entry(frozen, about, record, digest, before, decision))
    return ScoredSubmission(about, frozen.about.title, record, before, decision)


def standing_worst(records: Sequence[Record], like: Record) -> WorstCase | None:
    """Return the worst case over the `records` of the same view and question as `like`, None without any."""
    row = row_key(like.config)
    same = [r for r in records if row_key(r.config) == row and question_for(r) is question_for(like)]
    return worst_case(same, question_for(like).headline(like.config))


def open_truth(frozen: FrozenView, truth: Path, weights: str | None = None) -> OpenedTruth:
    """Return the organizer's half of a transcript; UsageError: it is missing, or does not match the commitment."""
    stem, about = truth / "truth" / frozen.about.id, frozen.about
    stated = parse_json(Truth, stem.with_suffix(".json"))
    path = stem.with_suffix(".safetensors")
    tensors = _truth(path, frozen)
    x, y = tensors["x"], tensors["y"]
    if stated.id != about.id or truth_commitment(stated.nonce, x, y) != about.commitment:
        raise UsageError(f"{path} is not the truth that transcript {about.id} was published with; give its folder.")
    units, data = tuple(c.unit for c in frozen.challenges), dict[Slot, Data]()
    for unit, *parts in zip(units, x, y, strict=True):
        batches = zip(*(part.split(about.batch) for part in parts), strict=True)
        data |= {slot: Data(*batch) for slot, batch in zip(unit, batches, strict=True)}
    known = feature_network(weights) if measurable(frozen.view.plan.spec.shape) else None
    gallery = None
    if "gallery" in tensors:
        gallery = Gallery(tensors["gallery"], tensors.get("classes"), frozen.view.plan.data_range, known)
    victims = Victims(data, units, frozen.view.data, about.batch)
    perceptual = weights_identity(weights) if known is not None else ""
    return OpenedTruth(
        Store(truth).load(stated.cell), victims, Yardstick(tensors.get("mean"), known, gallery), perceptual
    )


def _truth(path: Path, frozen: FrozenView) -> dict[str, torch.Tensor]:
    """Return the tensors beside `Truth`; UsageError: they do not fit the transcript."""
    spec, count, images = frozen.view.plan.spec, len(frozen.challenges), len(frozen.challenges[0].unit)
    try:
        tensors = load(read_bounded(path, TENSOR_BYTES))
        gallery_size = len(tensors["gallery"]) if "gallery" in tensors else 0
        right = {
            "x": (count, images * frozen.about.batch, *spec.shape),
            "y": (count, images * frozen.about.batch, *tensors["y"].shape[2:]),
            "mean": spec.shape,
            "gallery": (gallery_size, *spec.shape),
            "classes": (gallery_size,),
        }
        for name in ("x", *tensors):
            kind = torch.int64 if name == "classes" else torch.float32
            if tensors[name].dtype != kind or tuple(tensors[name].shape) != right[name]:
                raise ValueError(f"{name} is {tensors[name].dtype} of shape {tuple(tensors[name].shape)}")
    except (SafetensorError, KeyError, ValueError, TypeError) as cause:
        raise UsageError(f"{path} does not hold the truth ({because(cause)}); publish again.") from cause
    return tensors


def score_answers(
    frozen: FrozenView, known: OpenedTruth, about: GuessAbout, answers: list[Guess], digest: str
) -> tuple[Record, Scored, list[Record]]:
    """Return the record of answers, their scores, and the records of blind guesses on the same victims."""
    config = _config(known, about, digest)
    inquiry = inquiry_of(frozen, known, about.kind)
    with guard("questions", about.kind):
        scored = inquiry.score(answers)
        blind = [inquiry.score(one) for one in _blind(frozen, known)] if question_of(about.kind).inputs else []
    record = _record(known, config, scored, inquiry.digest)
    return record, scored, [_record(known, config, one, inquiry.digest) for one in blind]


def exchange_p(frozen: FrozenView, known: OpenedTruth, kind: str, answers: Sequence[Guess]) -> float:
    """Return the p of answers that do not tell victims apart, see `ledger.dealt`."""
    inquiry, question = inquiry_of(frozen, replace(known, yardstick=None), kind), question_of(kind)
    rule = question.rules_of(known.record.config)[0]
    places = {unit: place for place, unit in enumerate(known.victims.units)}
    owner = {slot: place for unit, place in places.items() for slot in unit}

    def judge(order: NDArray[np.intp]) -> NDArray[np.float64]:
        with guard("questions", kind):
            scores = inquiry.score([answers[place] for place in order]).victims
        each = np.array([question.judged(score, rule.metric) for score in scores]) * (-1.0 if rule.safer else 1.0)
        return np.asarray(np.bincount([owner[Slot(*score.slot)] for score in scores], each), dtype=np.float64)

    return permutation_p(len(answers), judge)


def inquiry_of(frozen: FrozenView, known: OpenedTruth, kind: str) -> Inquiry:
    """Return the inquiry of a transcript: its questions with the truth."""
    gallery = None if known.yardstick is None else known.yardstick.gallery
    test = Data(torch.zeros(0), torch.zeros(0)) if gallery is None else Data(gallery.x, torch.zeros(len(gallery.x)))
    ruler = known.yardstick
    probe = Probe(
        ExternalAttack(), frozen.view, known.victims, Seeds(0), test, None if ruler is None else lambda: ruler
    )
    return question_of(kind).of_probe(probe)


def _blind(frozen: FrozenView, known: OpenedTruth) -> list[list[Guess]]:
    """Return the blind guesses: mid-grey, and the mean of public examples if it is known."""
    shape, (low, high) = frozen.view.plan.spec.shape, frozen.view.plan.data_range
    grey = torch.full(shape, (low + high) / 2)
    mean = None if known.yardstick is None else known.yardstick.mean
    pictures = [grey] if mean is None else [grey, mean.float()]
    counts = [len(c.unit) * c.batch for c in frozen.challenges]
    return [[Guess(x=one.expand(n, *shape).clone()) for n in counts] for one in pictures]


def _config(known: OpenedTruth, about: GuessAbout, digest: str) -> CellConfig:
    base = known.record.config
    attack = AttackInfo(
        id=f"{PREFIX}{about.name}",
        version=about.version,
        kind=about.kind,
        parameters=about.parameters(digest),
        adaptive=about.knows,
    )
    threat = base.threat_model.model_copy(update={"knows_defense": about.knows, "auxiliary": about.auxiliary})
    seen = known.perceptual if question_of(about.kind).inputs else ""
    return base.model_copy(update={"attack": attack, "threat_model": threat, "tuning": 0, "perceptual": seen})


def _record(known: OpenedTruth, config: CellConfig, scored: Scored, digest: str) -> Record:
    base, victims = known.record, scored.victims
    return Record(
        cell_id=config.cell_id(),
        config=config,
        victims=victims,
        metrics=aggregate(victims, classes=config.model.classes, seed=config.seed, delta=base.privacy.delta),
        utility=base.utility,
        cost=base.cost,
        privacy=base.privacy,
        played=base.played,
        asked=digest,
        flags=list(scored.flags),
        status="complete",
        environment=base.environment,
    )


def _entry(
    frozen: FrozenView, about: GuessAbout, record: Record, digest: str, before: WorstCase | None, d: Decision
) -> BookEntry:
    return BookEntry(
        day=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        transcript=frozen.about.id,
        scene=frozen.about.title,
        kind=about.kind,
        attack=record.config.attack.id,
        version=about.version,
        reference=about.reference,
        guesses=digest,
        cell=record.cell_id,
        tries=d.tries,
        level=d.level,
        p=min(1.0, d.p),
        metric=d.metric,
        before=d.before,
        after=d.after,
        holder="" if before is None else before.name,
        moved=d.moved,
        reason=d.reason,
    )
