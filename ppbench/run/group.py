"""Run one group of cells (one view, several attacks), score them and keep their records."""

from __future__ import annotations

import dataclasses
import platform
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from ppbench.adversary.attack import Attack, Guess, is_silent, reads_anything
from ppbench.adversary.isolation import IsolatedAttack, NothingRead
from ppbench.adversary.two_worlds import world_flags
from ppbench.adversary.victims import Victims, choose_candidates, choose_victims, own_batches
from ppbench.base.confine import confinement
from ppbench.base.device import device_name
from ppbench.base.errors import Overflow, PluginError, UsageError
from ppbench.base.fence import guard
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Recent
from ppbench.base.version import __version__
from ppbench.federation.contract import Defense
from ppbench.federation.engine import Federation
from ppbench.federation.plan import Data
from ppbench.federation.view import View
from ppbench.federation.wire import Slot
from ppbench.questions.base import question_of
from ppbench.questions.inquiry import Inquiry, Probe, Scored, TargetModel
from ppbench.records.figure import aggregate
from ppbench.records.schema import Environment, FederationInfo, Flag, Privacy, Record, Tuned
from ppbench.records.store import Store
from ppbench.report.controls import UNREAD
from ppbench.report.knowing import is_ours
from ppbench.run.audit.runs import PointAudit, Refused
from ppbench.run.cells import Cell, CellGroup, cells
from ppbench.run.detection import detection_scores, probe_flags
from ppbench.run.experiment import Experiment
from ppbench.run.scene import Scene, draws_of, prepare_federation, probe_group, probe_victims, yardstick_of
from ppbench.run.task import Task
from ppbench.run.train import TrainingResult, federation, home_of, untrained, with_probe_guarantee

# -- Tuning of an attack's settings on examples whose truth the adversary knows, never on the reported victims --

FIRST_TUNING_PROBE = 1_000_000
"""Number of the first tuning probe: far from those of victims, whose noise and masks must not be reused."""


def rehearse(fed: Federation, experiment: Experiment, group: CellGroup) -> Scene:
    """Probe `tuning` images of the test part, which no client trains on and no cell reports."""
    victims = tuning_victims(fed.defense, experiment, group)
    return probe_victims(experiment, group, fed, victims, experiment.config.tuning)


def tuning_victims(defense: Defense, experiment: Experiment, group: CellGroup) -> Victims:
    """Return the victims of a rehearsal, examples of the test part; UsageError: it has too few."""
    task, clients, count = experiment.task, experiment.config.clients, experiment.config.tuning
    seeds, roles, sums = Seeds(task.seeds.seed("tuning")), len(defense.roles) if group.role else 1, defense.sums
    parts = {c: Data(task.test.x[c::clients], task.test.y[c::clients]) for c in range(clients)}
    try:
        return choose_victims(
            parts, group.threat, group.batch, count, seeds, sums=sums, roles=roles, first=FIRST_TUNING_PROBE
        )
    except UsageError as cause:
        raise UsageError(
            f"Option tuning={count} cannot be used: the {len(task.test.x)} test examples, dealt to {clients} "
            f"clients, are too few for so many in batches of {group.batch}; give fewer, or a smaller --attack-batch."
        ) from cause


def tune(attack: Attack, trial: Scene, task: Task, label: tuple[str | int, ...]) -> tuple[Attack, Tuned]:
    """Run all variants of `attack` on the tuning victims; return the best by its question's worth, and all scores.

    A variant that fails scores worst; ties go to the first. `label` names the cell, for the attack's draws.
    """
    variants = list(attack.variants())
    scores = [_run_variant(variant, trial, task, label) for variant in variants]
    best = max(range(len(variants)), key=lambda i: (scores[i], -i))
    settings = [dataclasses.asdict(variant) for variant in variants]
    differ = [name for name in settings[0] if len({repr(s[name]) for s in settings}) > 1]
    return variants[best], Tuned(variants=[{n: s[n] for n in differ} for s in settings], scores=scores, chosen=best)


def _run_variant(attack: Attack, trial: Scene, task: Task, label: tuple[str | int, ...]) -> float:
    victims, question = trial.victims, question_of(attack.kind)
    if not victims.units:
        return question.worth([], task.plan)
    try:
        with guard("attacks", attack.name):
            inquiry = question.of_probe(Probe(attack, trial.view, victims, task.seeds, task.test))
            guesses = attack.run(trial.view, inquiry.challenges, task.seeds.generator("tuning", *label))
            return question.worth(inquiry.score(guesses).victims, task.plan)
    except Exception as cause:  # noqa: BLE001 - another package's variant may raise anything; it is not chosen
        about = f"attack {attack.name!r} failed on tuning victims: {type(cause).__name__}: {cause}"
        warnings.warn(f"A variant of {about}; the others are compared without it.", stacklevel=2)
        return question.worth([], task.plan)


CellStatus = Literal["complete", "diverged", "failed"]
_KNOWN_FLAGS = Recent[tuple[Flag, ...]](64)


class AttackAnswer(NamedTuple):
    """An attack's guesses, and the reason if it failed."""

    guesses: list[Guess]
    failure: str | None


@dataclass
class Bench:
    """Runs the cells of one group and keeps their records."""

    experiment: Experiment
    group: CellGroup
    store: Store
    trained: TrainingResult
    privacy: Privacy = field(init=False)

    def __post_init__(self) -> None:
        self.privacy = self.trained.privacy

    def run(self, fed: Federation, missing: list[Cell]) -> None:
        """Probe, attack, score and keep each of `missing`; failures and overflows are kept with their reason."""
        run, reason = self._run_records if self.group.records else self._run_probed, self.trained.utility.reason
        if not self.trained.diverged or self.group.stage == "init":
            try:
                return run(fed, missing)
            except Overflow as cause:  # before any cell is kept: all of them attack one transcript
                reason = str(cause)
        self.keep_without_figures(missing, "diverged", reason)

    def finish_drafts(self, fed: Federation, missing: Sequence[Cell]) -> list[Cell]:
        """Keep those of `missing` that were attacked before the training, with its figures; return the others."""
        drafts, left = drafts_of(self.store.out), list[Cell]()
        self._state_guarantee(fed)
        for cell in missing:
            draft = drafts.load(cell.id) if drafts.finished(cell.id) else None
            if draft is None:
                left.append(cell)
                continue
            figures = {"utility": self.trained.utility, "cost": self.trained.cost, "played": self.trained.played}
            record, images = draft.model_copy(update={**figures, "privacy": self.privacy}), drafts.images(draft)
            tensors = None if images is None else {n: v for n, v in vars(images).items() if v is not None}
            self.store.save(record, seconds=drafts.seconds(cell.id), tensors=tensors)
        return left

    def run_audit(self, audit: PointAudit, missing: list[Cell]) -> None:
        """Attack, score and keep each of `missing` on the target of a complete audit."""
        if self.trained.diverged:
            self.keep_without_figures(missing, "diverged", self.trained.utility.reason)
            return
        view = audit.view(self.group.threat)
        for cell in missing:
            ask = partial(question_of(cell.attack.kind).of_audit, audit)
            self._run_cell(cell, view, ask, flags=audit.flags())

    def keep_without_figures(self, missing: Iterable[Cell], status: CellStatus, reason: str | None) -> None:
        """Keep cells that were not attacked, and why."""
        for cell in missing:
            self._keep(cell, Scored([]), 0.0, status, reason)

    def _run_records(self, fed: Federation, missing: list[Cell]) -> None:
        task, count = self.experiment.task, self.experiment.config.candidates
        threat = self.group.threat
        transcript = fed.observe() if self.group.stage == "iterate" else fed.release(threat)
        own = own_batches(threat, {Slot(-1, client): shard for client, shard in task.shards.items()})
        view = replace(transcript.view(threat, own=own), public=task.public)
        draw = partial(choose_candidates, task.shards, task.test, count, task.seeds, threat)
        model = TargetModel(task.test, count, fed.outputs, draw)
        for cell in missing:
            self._run_cell(cell, view, partial(question_of(cell.attack.kind).of_model, model))

    def _state_guarantee(self, fed: Federation) -> None:
        config = self.experiment.config
        self.privacy = with_probe_guarantee(self.trained.privacy, fed, config.probe, config.probe_rounds)

    def _run_probed(self, fed: Federation, missing: list[Cell]) -> None:
        group, task = self.group, self.experiment.task
        self._state_guarantee(fed)
        transcript, view, victims, acting = probe_group(self.experiment, group, fed)
        noticed_by = dict[Slot, float]()
        if acting is not None:
            victim_data = {slot: victims.data[slot] for unit in victims.units for slot in unit}
            noticed_by = detection_scores(fed, acting, transcript, victim_data)
        if not victims.units:
            self.keep_without_figures(missing, "failed", f"no probed client acted as {group.role}")
            return
        answers = dict[str, AttackAnswer]()
        missing_ids, needed = {cell.id for cell in missing}, {cell.follows for cell in missing}
        due = [c for c in cells(self.experiment, group) if c.id in missing_ids or c.attack.name in needed]
        rehearsed = any(cell.tuned for cell in due)  # before any cell is kept: a tuning probe may overflow
        trial = rehearse(fed, self.experiment, group) if rehearsed else None
        thorough = not is_ours(self.experiment.points[group.point].info)
        remarks = lru_cache(partial(probe_flags, fed, transcript, victims.data, thorough))  # once for a group's cells
        for cell in due:
            began, choice, earlier = time.perf_counter(), None, answers.get(cell.follows or "", AttackAnswer([], None))
            if earlier.failure is not None:
                reason = f"attack {cell.attack.name!r} has nothing to follow: {earlier.failure}"
                self.keep_without_figures([cell], "failed", reason)
                continue
            if trial is not None and cell.tuned:
                label = (cell.attack.name, group.threat.name, group.stage, group.batch)
                attack, choice = tune(cell.attack, trial, task, label)
                cell = replace(cell, attack=attack)
            ruler = partial(yardstick_of, self.experiment)
            probe = Probe(cell.attack, view, victims, task.seeds, task.test, ruler, earlier.guesses, noticed_by)
            ask = partial(question_of(cell.attack.kind).of_probe, probe)
            inputs = question_of(cell.attack.kind).inputs
            flags = remarks() if cell.attack.replays and inputs and group.threat.lone_server else ()
            flags += self._world_flags() if cell.attack.adaptive and inputs and group.threat.sees_uploads else ()
            spent, keep = time.perf_counter() - began, cell.id in missing_ids
            answers[cell.attack.name] = self._run_cell(
                cell, view, ask, choice=choice, flags=flags, spent=spent, keep=keep
            )

    def _world_flags(self) -> tuple[Flag, ...]:
        """Return the flags of the two-world test of the group's defense, on the untrained federation.

        Ours pass it in our tests. The flags are kept in this process, as they are those of all groups of a setting.
        """
        experiment, point = self.experiment, self.experiment.points[self.group.point]
        if is_ours(point.info):
            return ()
        task, size = experiment.task, min(experiment.config.attack_batch)
        ask = partial(world_flags, federation(experiment, point), task.params, size)
        return _KNOWN_FLAGS.of((str(home_of(experiment, point, Path())), size), ask)

    def _run_cell(
        self,
        cell: Cell,
        view: View,
        ask: Callable[[], Inquiry],
        *,
        choice: Tuned | None = None,
        flags: tuple[Flag, ...] = (),
        spent: float = 0.0,
        keep: bool = True,
    ) -> AttackAnswer:
        began = time.perf_counter() - spent
        try:
            with guard("attacks", cell.attack.name):
                inquiry = ask()
                guesses, scored, failure = self._attempt(cell, view, inquiry)
                if keep:
                    scored = replace(scored, flags=(*scored.flags, *flags))
                    status: CellStatus = "failed" if failure else "complete"
                    seconds = time.perf_counter() - began
                    self._keep(cell, scored, seconds, status, failure, choice, inquiry.digest)
        except PluginError as cause:  # another package's question, or scores that no record can hold
            guesses, failure = [], str(cause)
            if keep:
                self.keep_without_figures([cell], "failed", failure)
        return AttackAnswer(guesses, failure)

    def _attempt(self, cell: Cell, view: View, inquiry: Inquiry) -> tuple[list[Guess], Scored, str | None]:
        """Run and score an attack. Any fault of another package's attack fails the cell, not the run."""
        group, attack = self.group, cell.attack
        generator = torch.Generator().manual_seed(draws_of(self.experiment, group, attack.name, cell.follows or ""))
        try:
            with guard("attacks", attack.name):
                return self._run_attack(cell, view, inquiry, generator)
        except Exception as cause:  # noqa: BLE001
            sentence = f"attack {attack.name!r}: {type(cause).__name__}: {cause}"
            return [], Scored([]), str(cause) if isinstance(cause, PluginError) else sentence

    def _run_attack(
        self, cell: Cell, view: View, inquiry: Inquiry, generator: torch.Generator
    ) -> tuple[list[Guess], Scored, str | None]:
        attack = cell.attack
        try:  # a blind guess must not count as a defense that holds; an isolated attack checks in its own process
            asks = question_of(attack.kind).reads and not isinstance(attack, IsolatedAttack)
            if is_silent(view) or (asks and not reads_anything(attack, view, inquiry.challenges)):
                raise NothingRead
            guesses = attack.run(view, inquiry.challenges, generator)
        except NothingRead:
            return [], Scored([]), f"attack {attack.name!r}: nothing in the view of {view.threat} {UNREAD}"
        if len(guesses) != len(inquiry.challenges):
            raise ValueError(f"{len(guesses)} guesses for {len(inquiry.challenges)} questions")
        if odd := [guess for guess in guesses if not isinstance(guess, Guess)]:
            raise TypeError(f"a {type(odd[0]).__name__} where a Guess is expected")
        return guesses, inquiry.score(guesses), None

    def _keep(
        self,
        cell: Cell,
        scored: Scored,
        seconds: float,
        status: CellStatus,
        reason: str | None,
        choice: Tuned | None = None,
        digest: str | None = None,
    ) -> None:
        config, trained, victims = self.experiment.config, self.trained, scored.victims
        classes, delta = cell.config.model.classes, trained.privacy.delta
        record = Record(
            cell_id=cell.id,
            config=cell.config,
            victims=victims,
            metrics=aggregate(victims, classes=classes, seed=config.seed, delta=delta) if victims else [],
            utility=trained.utility,
            cost=trained.cost,
            privacy=self.privacy,
            played=trained.played,
            tuned=choice,
            asked=digest,
            flags=list(scored.flags),
            status=status,
            reason=reason,
            environment=_environment(cell.config.federation, isinstance(cell.attack, IsolatedAttack)),
        )
        self.store.save(record, seconds=seconds, tensors=scored.images)


def _environment(federation: FederationInfo, apart: bool) -> Environment:
    return Environment(
        ppbench=__version__,
        python=platform.python_version(),
        torch=torch.__version__,
        device=device_name(federation.device),
        threads=torch.get_num_threads(),
        dtype=f"{federation.dtype}, products in TF32" if federation.tf32 else federation.dtype,
        apart=confinement().words if apart else "",
    )


def run_group(experiment: Experiment, group: CellGroup, out: Path, only: Collection[str]) -> None:
    """Run those cells of `group` whose names are in `only` and that `out` does not hold complete or diverged."""
    store, every = Store(out), cells(experiment, group)
    if lost := {*only} - {c.id for c in every}:
        raise UsageError(f"The code of a plugin has changed since cell {min(lost)} was planned; start the run again.")
    missing = [c for c in every if c.id in only and not store.finished(c.id)]
    if not missing:
        return
    if group.stage == "audit":
        audit = PointAudit.of(experiment, experiment.points[group.point], out / "cache")
        _run_audit(audit, group, store, missing)
        return
    fed, trained = prepare_federation(experiment, group, out)
    bench = Bench(experiment, group, store, trained)
    if group.stage == "init":
        missing = bench.finish_drafts(fed, missing)
    if missing:
        bench.run(fed, missing)


# -- Drafts: cells at random weights, attacked before the training whose figures their records hold --


def drafts_of(out: Path) -> Store:
    """Return the store of records without the figures of a training, in the cache of a folder of results."""
    return Store(out / "cache" / "drafts")


def draft_group(experiment: Experiment, group: CellGroup, out: Path, only: Collection[str]) -> None:
    """Run those cells of a group at random weights whose names are in `only`, and keep them as drafts.

    `run_group` makes them records once the training has ended, without another attack.
    """
    drafts, (data, model, _) = drafts_of(out), experiment.facts
    fed = federation(experiment, experiment.points[group.point])
    fed.start(experiment.task.params)
    missing = [c for c in cells(experiment, group) if c.id in only and not drafts.finished(c.id)]
    Bench(experiment, group, drafts, untrained(model.classes, data.test, "not trained yet")).run(fed, missing)


def _run_audit(audit: PointAudit, group: CellGroup, store: Store, missing: list[Cell]) -> None:
    try:
        bench = Bench(audit.experiment, group, store, audit.complete().trained)
        bench.run_audit(audit, missing)
    except Refused as cause:
        keep_failed(audit.experiment, group, missing, store, str(cause))


def keep_failed(experiment: Experiment, group: CellGroup, missing: Iterable[Cell], store: Store, reason: str) -> None:
    """Keep cells of a group as failed, without figures of their training."""
    data, model, _ = experiment.facts
    bench = Bench(experiment, group, store, untrained(model.classes, data.test, reason))
    bench.keep_without_figures(missing, "failed", reason)
