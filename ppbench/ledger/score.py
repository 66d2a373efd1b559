"""Score submitted answers like our own cells, and decide whether a worst case moves."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, save
from scipy import stats
from torch import Tensor

from ppbench.adversary.attack import Attack, Guess
from ppbench.adversary.victims import Victims
from ppbench.base.errors import UsageError, because, shown
from ppbench.base.fence import guard
from ppbench.base.files import kind_of, locked, write_output
from ppbench.base.seeds import Seeds
from ppbench.base.tree import update_digest
from ppbench.federation.plan import Data
from ppbench.federation.wire import Slot
from ppbench.ledger.form import (
    EXTERNAL,
    TENSOR_BYTES,
    BookEntry,
    GuessAbout,
    Truth,
    add_entry,
    counting_records,
    parse_json,
    read_book,
    read_bounded,
    row_key,
    tries_at,
    truth_commitment,
)
from ppbench.ledger.transcript import FrozenView
from ppbench.metrics.intervals import Floats
from ppbench.metrics.modality import modality_in
from ppbench.metrics.perceptual import feature_network, measurable, weights_identity
from ppbench.metrics.recognition import Gallery
from ppbench.metrics.spec import Rule
from ppbench.questions.base import question_for, question_of
from ppbench.questions.inquiry import Inquiry, Probe, Scored, Yardstick
from ppbench.records.figure import aggregate
from ppbench.records.schema import AttackInfo, CellConfig, Record
from ppbench.records.store import Store, canonical_json
from ppbench.report.compare.paired import resampled_statistic, rules_for, sample_of
from ppbench.report.controls import value
from ppbench.report.worst import Measured, WorstCase, worst_case

# -- Whether answers tell victims apart: whether each is closest to its own victim, by an exact permutation test --
# A blind attacker may still know what such images look like, and beat the blind guesses of this bench with a better
# one. What it cannot know is which answer belongs to which victim: a random assignment of its answers would score as
# well. So answers are compared with one another, on every victim. Assigned at random, M victims get an answer that
# no other beats (of N answers, r_i are best at victim i), and P(M >= k) is at most E[C(M, k)] = e_k(r_1, ..., r_N) /
# (N (N - 1) ... (N - k + 1)); e_k is the elementary symmetric polynomial: 1 / k! without ties, 1 for equal answers.
# It holds for any scores.

MAX_BLOCK = 48
"""Most victims that are compared with one another; more are split into blocks, and permuted within each."""


def permutation_p(count: int, judge: Callable[[NDArray[np.intp]], Floats]) -> float:
    """Return the p-value of `count` answers under the hypothesis that they do not tell victims apart.

    judge: maps an order [count] to scores [count] of answer order[i] on victim i; larger is better.
    """
    blocks = np.array_split(np.arange(count), -(-count // MAX_BLOCK))
    own, best, ties = judge(np.arange(count)), np.full(count, -np.inf), np.zeros(count)
    for shift in range(max(map(len, blocks))):
        order = np.concatenate([np.roll(block, -shift) for block in blocks])
        scores = judge(order) if shift else own
        new = np.concatenate([np.full(len(block), shift < len(block)) for block in blocks])
        better = new & (scores > best)
        ties = np.where(better, 1.0, ties + (new & (scores == best)))
        best = np.where(better, scores, best)
    hits, tail = int((own >= best).sum()), np.ones(1)
    for block in blocks:
        tail = np.convolve(tail, _expected(ties[block]))
    return float(min(1.0, tail[: hits + 1].min()))


def _expected(ties: Floats) -> Floats:
    """Return E[C(M, k)] of one block for k = 0, ..., N: of N answers in random order, ties[i] are best on victim i."""
    falling = np.cumprod(np.concatenate([[1.0], np.arange(len(ties), 0, -1.0)]))
    return np.asarray(np.poly(-ties) / falling)  # its coefficients are the elementary symmetric polynomials


# -- A submitter's answers to a transcript: NAME.json (`GuessAbout`) and NAME.safetensors, checked before scoring --
# Tensors, one row per question in the transcript's order: x float32 [Q, U * B, *shape], in the data's range, not
# clipped; y int64 [Q, U * B]; confidence float64 [Q], smaller is surer; evaluations int64 [Q], gradients spent.
# Tensors that a kind of question does not need may be missing.

DTYPES = {"x": torch.float32, "y": torch.int64, "confidence": torch.float64, "evaluations": torch.int64}
HEADER_BYTES = 1 << 16
"""Bytes that a file may have beside its tensors."""


def save_guesses(path: Path | str, about: GuessAbout, guesses: Sequence[Guess]) -> Path:
    """Write an attack's guesses, one per question in order, as NAME.json and NAME.safetensors; return the JSON's path.

    Raises UsageError: only some guesses have x or y, or the files cannot be written.
    """
    tensors = {"evaluations": torch.tensor([guess.evaluations for guess in guesses])}
    for name in ("x", "y"):
        parts = [part for guess in guesses if (part := getattr(guess, name)) is not None]
        if parts and len(parts) != len(guesses):
            raise UsageError(f"{len(parts)} of {len(guesses)} guesses have {name}; give all of them one, or none.")
        if parts:
            tensors[name] = torch.stack([part.detach().cpu() for part in parts]).to(DTYPES[name])
    sure = [guess.confidence for guess in guesses]
    if None not in sure:
        tensors["confidence"] = torch.tensor([float(one) for one in sure if one is not None], dtype=torch.float64)
    target = Path(path).with_suffix(".json")
    write_output(target.with_suffix(".safetensors"), save(tensors))
    write_output(target, canonical_json(about))
    return target


def read_guesses(path: Path | str, frozen: FrozenView) -> tuple[GuessAbout, list[Guess], str]:
    """Return the content of NAME.json, the guesses, one per question, and their SHA-256 in hex.

    Raises UsageError: form, names, shapes, types or values do not fit the transcript, or they answer another one.
    """
    json_path = Path(path) if Path(path).suffix == ".json" else Path(path).with_suffix(".json")
    about, beside = parse_json(GuessAbout, json_path), json_path.with_suffix(".safetensors")
    if about.transcript != frozen.about.id:
        raise UsageError(
            f"{json_path} answers transcript {about.transcript}, and this is {frozen.about.id}; give its own."
        )
    if about.kind not in frozen.about.kinds:
        raise UsageError(
            f"{json_path} answers {shown(about.kind)}; the transcript asks for {' or '.join(frozen.about.kinds)}."
        )
    data = read_bounded(beside, _most(frozen))
    tensors = _tensors(data, beside)
    count = len(frozen.challenges)
    for name, tensor in tensors.items():
        _check(name, tensor, frozen, beside)
    guesses = [_guess(tensors, place) for place in range(count)]
    question = question_of(about.kind)
    for place, (guess, challenge) in enumerate(zip(guesses, frozen.challenges, strict=True)):
        for fault in question.malformed(guess, challenge, frozen.view.plan):
            raise UsageError(f"{beside}, question {place}: {fault}.")
    return about, guesses, answers_digest(tensors)


def answers_digest(tensors: dict[str, Tensor]) -> str:
    """Return the SHA-256 of answers, of x and y alone."""
    digest = hashlib.sha256()
    for name in sorted({"x", "y"} & set(tensors)):
        digest.update(name.encode())
        update_digest(digest, tensors[name])
    return digest.hexdigest()


def _most(frozen: FrozenView) -> int:
    """Return the largest size in bytes of a file of answers; no more is read."""
    images = sum(len(challenge.unit) * challenge.batch for challenge in frozen.challenges)
    return HEADER_BYTES + images * (4 * math.prod(frozen.view.plan.spec.shape) + 8) + 16 * len(frozen.challenges)


def _tensors(data: bytes, path: Path) -> dict[str, Tensor]:
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError, RuntimeError) as cause:
        raise UsageError(f"{path} is no safetensors file ({because(cause)}); write one of x, y.") from cause
    if odd := sorted(set(tensors) - set(DTYPES)):
        raise UsageError(f"{path} holds a tensor {shown(odd[0])}; it may hold {', '.join(DTYPES)}.")
    return tensors


def _check(name: str, tensor: Tensor, frozen: FrozenView, path: Path) -> None:
    count = len(frozen.challenges)
    images = len(frozen.challenges[0].unit) * frozen.about.batch
    right = {"x": (count, images, *frozen.view.plan.spec.shape), "y": (count, images)}.get(name, (count,))
    if tensor.dtype != DTYPES[name] or tuple(tensor.shape) != right:
        shape = f"of {tensor.dim():,} axes" if tensor.dim() > len(right) + 1 else tuple(tensor.shape)
        seen = f"{tensor.dtype} {shape}".removeprefix("torch.")
        raise UsageError(f"{path}: {name} is {seen}; it must be {str(DTYPES[name])[6:]} of shape {right}.")
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        raise UsageError(f"{path}: {name} holds values that are not finite; answer with any number instead.")
    if name == "evaluations" and bool((tensor < 0).any()):
        raise UsageError(f"{path}: evaluations holds {int(tensor.min())}; counts are 0 or more.")


def _guess(tensors: dict[str, Tensor], place: int) -> Guess:
    x, y = (tensors[name][place] if name in tensors else None for name in ("x", "y"))
    sure = float(tensors["confidence"][place]) if "confidence" in tensors else None
    spent = int(tensors["evaluations"][place]) if "evaluations" in tensors else 0
    return Guess(x=x, y=y, confidence=sure, evaluations=spent)


# -- Whether a guess moves the worst case of a row: it must be better than the worst case so far and than blind
# guesses --
# Victims are compared pairwise, by the rules of `ppbench compare`: the figure must gain, and more victims must leak
# more than less, by an exact sign test, since no bootstrap of a few victims supports a p of a millionth. A blind
# attacker may beat the blind guesses, so its answers must also tell victims apart (`permutation_p`). Many tries
# succeed by chance; so the K-th submission to a transcript is judged at level LEDGER_ALPHA / (zeta(3/2) K^(3/2)):
# over all tries, however many, a row moves without reason with probability LEDGER_ALPHA at most (a union bound, so
# tries may depend on one another). The few victims of a row are therefore spent at some point, and this is reported:
# N units show no p below 2^-N. Published scores would reveal the truth; so a submission that did not move the row
# gets only this answer (Blum and Hardt 2015, the Ladder): see `ScoredSubmission.receipt`.

LEDGER_ALPHA = 0.05
"""Probability that a row ever moves without reason."""
POWER = 1.5
_WHOLE = float(stats.zipf(POWER).pmf(1)) ** -1  # zeta(3/2)
DECIDING = ("mean", "median", "decision")


@dataclass(frozen=True)
class Decision:
    """Whether the worst case moves, as the book has it. tries: including this one; level: of the test; p: the smallest
    of all rules, on its `metric`; before, after: that figure; reason: a clause."""

    moved: bool
    tries: int
    level: float
    p: float
    metric: str
    before: float | None
    after: float
    reason: str


def try_level(tries: int) -> float:
    """Return the level at which the `tries`-th submission to a transcript is judged; they sum to LEDGER_ALPHA."""
    return float(LEDGER_ALPHA / (_WHOLE * tries**POWER))


def floor_of(record: Record) -> float:
    """Return the smallest p that a record's victims can show, by exact one-sided sign tests over all rules."""
    return len(_deciding(record)) * 2.0 ** -len({score.unit for score in record.victims})


def decide(
    now: Measured | None, blind: Sequence[Record], new: Record, tries: int, dealt: Callable[[], float] | None = None
) -> Decision:
    """Return whether `new` moves a row.

    now: the worst case so far, None for none. blind: records of blind guesses on the same victims; () if the question
    knows the chance of a right answer instead. dealt: returns the p of answers that do not tell victims apart
    (`permutation_p`), called if all else would move the row; None: not tested.
    """
    others = [side for side in (now, *blind) if side is not None]
    rules, level = _deciding(new, *others), try_level(tries)
    best: Decision | None = None
    for rule in rules:
        p = max((p_of(side, new, rule) for side in others), default=0.0)  # better than all of them
        p = min(1.0, len(rules) * max(p, 0.0 if blind else _by_chance(new)))  # by any rule
        before, after = None if now is None else _figure(now, rule.metric), _figure(new, rule.metric)
        reason = _reason(p, level, floor_of(new), now is not None)
        one = Decision(p <= level, tries, level, p, rule.metric, before, after, reason)
        best = one if best is None or one.p < best.p else best
    if best is None:
        raise ValueError(f"question {question_for(new).name!r} has no rule that decides on single victims")
    if not best.moved or dealt is None or (p := dealt()) <= level:
        return best
    why = f"its answers fit other victims as well as their own (p = {p:.2g}, judged at {level:.2g})"
    return replace(best, moved=False, p=p, reason=why)


def _deciding(*sides: Measured) -> list[Rule]:
    """Return the rules that decide on single victims, of metrics that all sides have: an older one may lack some."""
    return [
        rule
        for rule in rules_for(sides[0])
        if rule.form in DECIDING and all(value(side, rule.metric) is not None for side in sides)
    ]


def p_of(side: Measured, new: Record, rule: Rule) -> float:
    """Return the p of no gain of `new` over `side`, by an exact sign test on units without ties; 1 without a gain of
    the figure. Victims count by `Question.judged`."""
    sample = sample_of(side, new, rule)
    once = np.ones((1, len(sample.stratum)))
    base, now = (float(resampled_statistic(sample, values, rule.form, once)[0]) for values in (sample.base, sample.new))
    old, own = (np.bincount(sample.unit, sample.weight * values) for values in (sample.base, sample.new))
    more, less = (int((one > two).sum()) for one, two in ((own, old), (old, own)))
    gains = less if rule.safer else more
    better = now < base if rule.safer else now > base
    return float(stats.binom.sf(gains - 1, more + less, 0.5)) if better else 1.0


def _by_chance(new: Record) -> float:
    """Return the p of so many right answers by chance, 1 if the chance is unknown."""
    counts = question_for(new).blind(new.victims, new.config)
    if counts is None:
        return 1.0
    share, units, chance = counts
    return float(stats.binom.sf(round(share * units) - 1, units, chance))


def _figure(side: Measured, metric: str) -> float:
    figure = side.metric(metric)
    return 0.0 if figure is None or figure.value is None else figure.value


def _reason(p: float, level: float, floor: float, stands: bool) -> str:
    if p <= level:
        return f"better, victim by victim (p = {p:.2g}, judged at {level:.2g})"
    if floor > level:
        return (
            f"so few victims show no p below {floor:.2g}, and after so many tries it would have to be {level:.2g}: "
            "this transcript is spent; publish others"
        )
    than = "than the worst case so far, or than a blind guess" if stands else "than a blind guess"
    return f"not better {than} beyond chance (p = {p:.2g}, judged at {level:.2g})"


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
        with guard("questions", about.kind):
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
    plan = frozen.view.plan
    known = feature_network(weights) if modality_in(plan).perceptual and measurable(plan.spec.shape) else None
    gallery = None
    if "gallery" in tensors:
        gallery = Gallery(tensors["gallery"], tensors.get("classes"), plan.data_range, known)
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
    scored = inquiry.score(answers)
    blind = [inquiry.score(one) for one in _blind(frozen, known)] if question_of(about.kind).inputs else []
    record = _record(known, config, scored, inquiry.digest)
    return record, scored, [_record(known, config, one, inquiry.digest) for one in blind]


def exchange_p(frozen: FrozenView, known: OpenedTruth, kind: str, answers: Sequence[Guess]) -> float:
    """Return the p of answers that do not tell victims apart, see `permutation_p`."""
    inquiry, question = inquiry_of(frozen, replace(known, yardstick=None), kind), question_of(kind)
    rule = question.rules_of(known.record.config)[0]
    places = {unit: place for place, unit in enumerate(known.victims.units)}
    owner = {slot: place for unit, place in places.items() for slot in unit}

    def judge(order: NDArray[np.intp]) -> NDArray[np.float64]:
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
    frozen: FrozenView, about: GuessAbout, record: Record, digest: str, before: WorstCase | None, decision: Decision
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
        holder="" if before is None else before.name,
        **asdict(decision),
    )
