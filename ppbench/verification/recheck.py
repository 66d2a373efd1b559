"""Recompute for `ppbench verify`, with local data and plugins: victims, originals, guarantees, trainings.

Networks of records are not built, whoever wrote them: a small one stands in when data are dealt out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from math import isclose
from pathlib import Path
from typing import Any, cast

import torch

from ppbench.adversary.attack import Challenge, Guess
from ppbench.adversary.victims import Victims, choose_candidates, choose_victims
from ppbench.base.errors import UsageError
from ppbench.base.registry import find
from ppbench.claims.check import claimed
from ppbench.federation.contract import Defense
from ppbench.federation.engine import probe_plan
from ppbench.federation.plan import Data, Plan
from ppbench.federation.threats import threat_model
from ppbench.federation.view import Transcript
from ppbench.metrics.modality import modality_of
from ppbench.questions.base import question_for
from ppbench.questions.inquiry import Inquiry, Probe, TargetModel
from ppbench.records.run_files import commitment, salt_of, training_of
from ppbench.records.schema import CellConfig, Record
from ppbench.records.store import Store
from ppbench.report.integrity import TRAINING_FIELDS, of_training
from ppbench.run.cells import plan_of_cell, task_of_cell
from ppbench.run.experiment import make_defense
from ppbench.run.sweep import local_dataset, missing_cells
from ppbench.run.task import Task
from ppbench.run.train import is_trained, load_trained
from ppbench.verification import Findings, examine

MAX_BUILT = 1_000_000
"""Most values of an input, and a thousand times the classes, of a network that is built to check a guarantee."""
EPSILON_TOLERANCE = 1e-6
"""Relative difference beyond which an epsilon is not the mechanism's: accountants optimize over orders."""


@dataclass
class _Notes:
    """Problems, and counts of what could not be checked. salt: the secret of the folder, "" for none."""

    salt: str = ""
    problems: list[str] = field(default_factory=list)
    unchecked: Counter[str] = field(default_factory=Counter)

    def wrong(self, record: Record, clause: str) -> None:
        self.problems.append(f"{record.cell_id}.json: {clause}")


def recheck(store: Store, records: Sequence[Record]) -> Findings:
    """Return the problems of sound records that local data sets and plugins show, and what could not be checked."""
    notes = _Notes(salt_of(store.out, fresh=False))
    for record in records:
        task = _task_of(record.config, notes)
        defense = _defense_of(record, notes)
        if defense is not None:
            _guarantee(record, defense, task, notes)
        if defense is not None and task is not None and record.victims:
            _victims(store, record, defense, task, notes)
    _trainings(store, records, notes)
    for sentence, problem in missing_cells(records):
        if problem:
            notes.problems.append(sentence)
        else:
            notes.unchecked[sentence] += 1
    unchecked = [what if n == 1 else f"{what} in {n} cells" for what, n in notes.unchecked.items()]
    return Findings(tuple(notes.problems), tuple(unchecked))


def full_findings(out: Path) -> Findings:
    """Return what `examine` finds with everything that can be checked here: claims, data, plugins and the cache."""
    return examine(out, claimed, recheck)


# -- what is at hand ---------------------------------------------------------------------------------------------------
def _task_of(config: CellConfig, notes: _Notes) -> Task | None:
    """Return the task of a record, None if its data are not available."""
    about = config.federation, config.data
    salt = notes.salt if config.data.salt else ""
    if commitment(salt) != config.data.salt:
        notes.unchecked["victims, originals and recognition (drawn with a secret: OUT/salt is not here)"] += 1
        return None
    try:
        text = local_dataset(config.data.name)
        return (
            None
            if text is None
            else task_of_cell(text, config.model.loss, config.seed, salt, *(p.model_dump_json() for p in about))
        )
    except (UsageError, ValueError, OSError) as cause:
        notes.problems += [f"{config.cell_id()}.json: {config.data.name} gives no such federation ({cause})"]
        return None
    finally:
        if local_dataset(config.data.name) is None:
            notes.unchecked[f"victims, originals and recognition ({config.data.name} is not at hand)"] += 1


def _defense_of(record: Record, notes: _Notes) -> Defense | None:
    about = record.config.defense
    try:
        defense = make_defense(about.id, about.parameters)
    except UsageError:
        notes.unchecked[
            f"epsilon and victims (defense {about.id} is not installed here, or not with such parameters)"
        ] += 1
        return None
    if defense.version == about.version and type(defense).__module__.startswith("ppbench."):
        return defense
    notes.unchecked[f"epsilon and victims (defense {about.id} is another package's, or another version)"] += 1
    return None


# -- the guarantee -----------------------------------------------------------------------------------------------------
def _guarantee(record: Record, defense: Defense, task: Task | None, notes: _Notes) -> None:
    config = record.config
    if record.status == "failed" or record.utility.curve == [] or config.audit is not None:
        return  # a training that did not end, or on other shards
    fed = config.federation
    sizes = {len(shard.x) for shard in task.shards.values()} if task is not None else {config.data.train // fed.clients}
    try:
        plan, other = plan_of_cell(config), plan_of_cell(config, classes=2)
        if _epsilon(defense, plan, 1, fed.rounds) != _epsilon(defense, other, 1, fed.rounds):  # networks matter
            if not _small(config):
                notes.unchecked["epsilon (it depends on the network, which is not built here)"] += 1
                return
            plan = plan_of_cell(config, config.model.id)
        whole = _weakest(defense, lambda size: plan, sizes, fed.rounds)
        kind, rounds = config.probe, config.probe_rounds
        one = _weakest(defense, lambda size: probe_plan(plan, defense, size, kind, rounds, whole=True), sizes, rounds)
    except Exception as cause:  # noqa: BLE001 - parameters of a record may be anything
        notes.wrong(record, f"its mechanism's guarantee cannot be computed ({type(cause).__name__}: {cause})")
        return
    if whole is not None and task is None and whole != (0.0, 0.0):
        notes.unchecked["epsilon (it depends on the sizes of shards)"] += 1
        return
    stated = record.privacy
    _compare(record, (stated.epsilon, stated.delta), whole, "privacy", notes)
    if stated.probe_epsilon is not None:
        _compare(record, (stated.probe_epsilon, stated.probe_delta), one, "the guarantee of its probe", notes)


def _weakest(
    defense: Defense, plan_of: Callable[[int], Plan], sizes: Iterable[int], rounds: int
) -> tuple[float, float] | None:
    """Return the weakest client's (epsilon, delta), None if a client has no guarantee."""
    guarantees = [_epsilon(defense, plan_of(max(1, size)), max(1, size), rounds) for size in sorted(sizes)]
    return None if None in guarantees else max(pair for pair in guarantees if pair is not None)


def _compare(
    record: Record,
    stated: tuple[float | None, float | None],
    guarantee: tuple[float, float] | None,
    what: str,
    notes: _Notes,
) -> None:
    """Note a problem if a record does not state its mechanism's guarantee."""
    pairs = zip(stated, guarantee or (None, None), strict=True)
    if not all(a is b if a is None or b is None else isclose(a, b, rel_tol=EPSILON_TOLERANCE) for a, b in pairs):
        words = "none" if guarantee is None else f"({guarantee[0]:.6g}, {guarantee[1]:.6g})"
        notes.wrong(record, f"{what} is ({stated[0]}, {stated[1]}), its mechanism's guarantee {words}")


@lru_cache(maxsize=256)
def _epsilon(defense: Defense, plan: Plan, examples: int, rounds: int) -> tuple[float, float] | None:
    return defense.guarantee(plan, examples, rounds)


def _small(config: CellConfig) -> bool:
    """Return whether a record's network may be built: one of ours, of moderate size."""
    plugin, about = find("models", config.model.id), config.model
    ours = plugin is not None and plugin.ours and about.options == {}
    return ours and math.prod(about.shape) <= MAX_BUILT and about.classes <= MAX_BUILT // 1000


# -- victims -----------------------------------------------------------------------------------------------------------
def _victims(store: Store, record: Record, defense: Defense, task: Task, notes: _Notes) -> None:
    config, question = record.config, question_for(record)
    if config.audit is not None or (config.role and record.victims[0].slot is None):
        notes.unchecked["which candidates or victims were asked about (of audits and roles)"] += 1
        return
    try:
        victims = _draw_victims(record, defense, task) if question.source == "probe" else None
        inquiry = _inquiry(record, defense, task, victims)
        expected = [(score.place, score.truth) for score in inquiry.score(_empty_guesses(inquiry, config)).victims]
    except Exception as cause:  # noqa: BLE001 - another package's question may raise anything
        notes.unchecked[f"victims of {question.name} ({type(cause).__name__})"] += 1
        return
    where = f"seed {config.seed} draws from {config.data.name}"
    if [(score.place, score.truth) for score in record.victims] != expected:
        notes.wrong(record, f"its victims, or what its scores say of the truth, are not those that {where}")
    if record.asked is not None and record.asked != inquiry.digest:
        notes.wrong(record, f"asked is {record.asked}, what {where} has the digest {inquiry.digest}")
    if victims is not None and question.inputs:
        _images(store, record, victims, task, notes)


def _draw_victims(record: Record, defense: Defense, task: Task) -> Victims:
    config, threat = record.config, threat_model(record.config.threat_model.id)
    roles = len(defense.roles) if config.role or threat.acts else 1
    count, seeds = config.victims, task.seeds
    victims = choose_victims(
        task.shards, threat, config.batch_size, count, seeds, sums=defense.sums, roles=roles, skip=config.victims_from
    )
    if not config.role:
        return victims
    mine = {score.slot for score in record.victims}
    return replace(victims, units=tuple(u for u in victims.units if {(s.probe, s.client) for s in u} <= mine))


def _inquiry(record: Record, defense: Defense, task: Task, victims: Victims | None) -> Inquiry:
    config, question = record.config, question_for(record)
    if victims is None:
        threat = threat_model(config.threat_model.id)
        draw = partial(choose_candidates, task.shards, task.test, config.victims, task.seeds, threat)
        outputs = partial(_zeros, config.model.classes)
        return question.of_model(TargetModel(task.test, config.victims, outputs, draw))
    view = Transcript(task.plan, defense, (), ()).view(config.threat_model.id, own=victims.own)
    nobody = cast(Any, None)  # no attack is run
    return question.of_probe(Probe(nobody, view, victims, task.seeds, task.test))


def _zeros(classes: int, x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(x), classes, dtype=torch.float64)


def _empty_guesses(inquiry: Inquiry, config: CellConfig) -> list[Guess]:
    """Return guesses without content; only the truth in their scores is used."""

    def one(challenge: Challenge) -> Guess:
        count = 0 if challenge.x is None else len(challenge.x)
        none = torch.zeros(count)
        return Guess(score=none, decision=none.bool(), outputs=torch.zeros(count, config.model.classes).double())

    return [one(challenge) for challenge in inquiry.challenges]


def _images(store: Store, record: Record, victims: Victims, task: Task, notes: _Notes) -> None:
    from ppbench.questions.images import recognized
    from ppbench.questions.reconstruction import image_scores

    try:
        images = store.images(record)
    except UsageError:  # already a problem of `ppbench.verification`
        return
    if images is None:
        return
    truth = Data(*(torch.cat([getattr(victims.truth(u), part) for u in victims.units]) for part in ("x", "y")))
    own, guess = torch.from_numpy(images.truth), torch.from_numpy(images.guess)
    if own.shape != truth.x.shape or not torch.equal(own, truth.x):
        notes.wrong(record, f"the originals beside its scores are not the victims' images in {record.config.data.name}")
        return
    seen = task.test if task.public is None else task.public
    mean = modality_of(record.config).blind_guess(seen.x)
    if images.blind is not None and not torch.allclose(torch.from_numpy(images.blind[0]), mean, atol=EPSILON_TOLERANCE):
        notes.wrong(record, "its blind guess is not the mean of the examples that all may see")
    gallery, scores = task.gallery(), image_scores(record)
    if gallery is None or any(score.recognition is None for score in scores):
        return
    for score, fresh in zip(scores, recognized(scores, guess, own, truth.y, gallery), strict=True):
        stated, computed = score.recognition, fresh.recognition
        if stated is not None and computed is not None and _seen(stated) != _seen(computed):
            notes.wrong(
                record, f"recognition of victim {score.place} is {_seen(stated)}, its image gives {_seen(computed)}"
            )
            return
    if record.config.perceptual:
        notes.unchecked["lpips, feat_mse and recognition by features (they need the weights)"] += 1


def _seen(recognition: Any) -> tuple[object, ...]:
    return recognition.gallery, recognition.rank, recognition.read, recognition.common


# -- trainings ---------------------------------------------------------------------------------------------------------
def _trainings(store: Store, records: Sequence[Record], notes: _Notes) -> None:
    """Compare trainings with the cache, as far as it still holds them whole."""
    for record in records:
        home = store.out / "cache" / training_of(record)
        if record.config.audit is not None or record.status == "failed" or not is_trained(home):
            continue
        try:
            kept = load_trained(home)
        except UsageError:
            notes.unchecked["what a training gave (its states in the cache are damaged or without digests)"] += 1
            continue
        for name in TRAINING_FIELDS:
            if of_training(kept, name) != of_training(record, name):
                notes.wrong(record, f"{name} is not what the training in cache/{home.name} gave")
