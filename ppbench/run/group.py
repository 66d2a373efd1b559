"""How one group of cells (one view, several attacks) is run, scored and kept."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from ppbench.adversary.apart import Apart, Unread
from ppbench.adversary.attack import Guess
from ppbench.adversary.reading import read, silent
from ppbench.adversary.victims import choose_candidates, own_batches
from ppbench.base.blame import guard
from ppbench.base.confine import in_force
from ppbench.base.device import device_name
from ppbench.base.errors import Overflow, PluginError, UsageError
from ppbench.base.version import __version__
from ppbench.federation.engine import Federation
from ppbench.federation.view import View
from ppbench.federation.wire import Slot
from ppbench.questions.base import question_of
from ppbench.questions.inquiry import Inquiry, Model, Probe, Scored
from ppbench.records.aggregate import aggregate
from ppbench.records.schema import Environment, FederationInfo, Flag, Privacy, Record, Tuned
from ppbench.records.store import Store
from ppbench.report.controls import UNREAD
from ppbench.run.audit.questions import Questions
from ppbench.run.audit.runs import Audit, Refused
from ppbench.run.cells import Cell, Group, cells, finished
from ppbench.run.detection import detected
from ppbench.run.experiment import Experiment
from ppbench.run.noticing import noticed
from ppbench.run.scene import attacked, draws_of, probed, yardstick_of
from ppbench.run.train import Trained, of_probe, untrained
from ppbench.run.tuning import rehearsal, tuned

Status = Literal["complete", "diverged", "failed"]


class Answer(NamedTuple):
    """What an attack answered, and why it could not."""

    guesses: list[Guess]
    failure: str | None


@dataclass
class Bench:
    """Runs the cells of one group and keeps their records."""

    experiment: Experiment
    group: Group
    store: Store
    trained: Trained
    privacy: Privacy = field(init=False)

    def __post_init__(self) -> None:
        self.privacy = self.trained.privacy

    def run(self, fed: Federation, missing: list[Cell]) -> None:
        """Probe, attack, score and keep each of `missing`; what fails, or leaves the range of uploads, says so."""
        answer, reason = self._records if self.group.records else self._probed, self.trained.utility.reason
        if not self.trained.diverged or self.group.stage == "init":
            try:
                return answer(fed, missing)
            except Overflow as cause:  # before any cell is kept: all of them attack one transcript
                reason = str(cause)
        self.keep_without_figures(missing, "diverged", reason)

    def audited(self, questions: Questions, missing: list[Cell]) -> None:
        """Attack, score and keep each of `missing` on the target of a complete audit."""
        if self.trained.diverged:
            self.keep_without_figures(missing, "diverged", self.trained.utility.reason)
            return
        view = questions.view(self.group.threat)
        for cell in missing:
            ask = partial(question_of(cell.attack.kind).of_audit, questions)
            self._answered(cell, view, ask, flags=questions.flags())

    def keep_without_figures(self, missing: Iterable[Cell], status: Status, reason: str | None) -> None:
        """Keep cells that were not attacked, and why."""
        for cell in missing:
            self._keep(cell, Scored([]), 0.0, status, reason)

    def _records(self, fed: Federation, missing: list[Cell]) -> None:
        task, count = self.experiment.task, self.experiment.config.candidates
        transcript = fed.observe() if self.group.stage == "iterate" else fed.release()
        threat = self.group.threat
        own = own_batches(threat, {Slot(-1, client): shard for client, shard in task.shards.items()})
        view = replace(transcript.view(threat, own=own), public=task.public)
        draw = partial(choose_candidates, task.shards, task.test, count, task.seeds, threat)
        model = Model(task.test, count, fed.outputs, draw)
        for cell in missing:
            self._answered(cell, view, partial(question_of(cell.attack.kind).of_model, model))

    def _probed(self, fed: Federation, missing: list[Cell]) -> None:
        group, task, config = self.group, self.experiment.task, self.experiment.config
        self.privacy = of_probe(self.trained.privacy, fed, config.probe, config.probe_rounds)
        transcript, view, victims, acting = probed(self.experiment, group, fed)
        noticed_by = dict[Slot, float]()
        if acting is not None:
            asked = {slot: victims.data[slot] for unit in victims.units for slot in unit}
            noticed_by = detected(fed, acting, transcript, asked)
        if not victims.units:
            self.keep_without_figures(missing, "failed", f"no probed client acted as {group.role}")
            return
        given = dict[str, Answer]()
        wanted, needed = {cell.id for cell in missing}, {cell.follows for cell in missing}
        due = [c for c in cells(self.experiment, group) if c.id in wanted or c.attack.name in needed]
        rehearsed = any(cell.tuned for cell in due)  # before any cell is kept: it may leave the range of what is sent
        trial = rehearsal(fed, self.experiment, group) if rehearsed else None
        remarks = lru_cache(partial(noticed, fed, transcript, victims.data))  # the same for all cells of a group
        for cell in due:
            began, choice, earlier = time.perf_counter(), None, given.get(cell.follows or "", Answer([], None))
            if earlier.failure is not None:
                reason = f"attack {cell.attack.name!r} has nothing to follow: {earlier.failure}"
                self.keep_without_figures([cell], "failed", reason)
                continue
            if trial is not None and cell.tuned:
                label = (cell.attack.name, group.threat.name, group.stage, group.batch)
                attack, choice = tuned(cell.attack, trial, task, label)
                cell = replace(cell, attack=attack)
            ruler = partial(yardstick_of, self.experiment)
            probe = Probe(cell.attack, view, victims, task.seeds, task.test, ruler, earlier.guesses, noticed_by)
            ask = partial(question_of(cell.attack.kind).of_probe, probe)
            looks = cell.attack.reads_alone and question_of(cell.attack.kind).inputs and group.threat.lone_server
            flags = remarks() if looks else ()
            spent, keep = time.perf_counter() - began, cell.id in wanted
            given[cell.attack.name] = self._answered(
                cell, view, ask, choice=choice, flags=flags, spent=spent, keep=keep
            )

    def _answered(
        self,
        cell: Cell,
        view: View,
        ask: Callable[[], Inquiry],
        *,
        choice: Tuned | None = None,
        flags: tuple[Flag, ...] = (),
        spent: float = 0.0,
        keep: bool = True,
    ) -> Answer:
        began = time.perf_counter() - spent
        try:
            with guard("attacks", cell.attack.name):
                inquiry = ask()
                guesses, scored, failure = self._attempt(cell, view, inquiry)
                if keep:
                    scored = replace(scored, flags=(*scored.flags, *flags))
                    status: Status = "failed" if failure else "complete"
                    seconds = time.perf_counter() - began
                    self._keep(cell, scored, seconds, status, failure, choice, inquiry.digest)
        except PluginError as cause:  # a stranger's question, or scores that no record can hold
            guesses, failure = [], str(cause)
            if keep:
                self.keep_without_figures([cell], "failed", failure)
        return Answer(guesses, failure)

    def _attempt(self, cell: Cell, view: View, inquiry: Inquiry) -> tuple[list[Guess], Scored, str | None]:
        """Run and score an attack. A stranger's may raise, or answer, anything: a failed cell, never a lost run."""
        group, attack = self.group, cell.attack
        generator = torch.Generator().manual_seed(draws_of(self.experiment, group, attack.name, cell.follows or ""))
        try:
            with guard("attacks", attack.name):
                return self._attacked(cell, view, inquiry, generator)
        except PluginError as cause:
            return [], Scored([]), str(cause)
        except Exception as cause:  # noqa: BLE001
            return [], Scored([]), f"attack {attack.name!r}: {type(cause).__name__}: {cause}"

    def _attacked(
        self, cell: Cell, view: View, inquiry: Inquiry, generator: torch.Generator
    ) -> tuple[list[Guess], Scored, str | None]:
        attack = cell.attack
        try:  # a blind guess must not pass for a defense that holds; who is apart reads there
            asks = question_of(attack.kind).reads and not isinstance(attack, Apart)
            if silent(view) or (asks and not read(attack, view, inquiry.challenges)):
                raise Unread
            guesses = attack.run(view, inquiry.challenges, generator)
        except Unread:
            return [], Scored([]), f"attack {attack.name!r}: nothing in the view of {view.threat} {UNREAD}"
        if len(guesses) != len(inquiry.challenges):
            raise ValueError(f"{len(guesses)} guesses to {len(inquiry.challenges)} questions")
        if odd := [guess for guess in guesses if not isinstance(guess, Guess)]:
            raise TypeError(f"a {type(odd[0]).__name__} where a Guess is asked for")
        return guesses, inquiry.score(guesses), None

    def _keep(
        self,
        cell: Cell,
        scored: Scored,
        seconds: float,
        status: Status,
        reason: str | None,
        choice: Tuned | None = None,
        asked: str | None = None,
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
            asked=asked,
            flags=list(scored.flags),
            status=status,
            reason=reason,
            environment=_environment(cell.config.federation, isinstance(cell.attack, Apart)),
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
        apart=in_force().words if apart else "",
    )


def run_group(experiment: Experiment, group: Group, out: Path, only: Collection[str]) -> None:
    """Run those cells of `group` whose names are in `only` and that `out` does not hold complete or diverged."""
    store, every = Store(out), cells(experiment, group)
    if lost := {*only} - {c.id for c in every}:
        raise UsageError(f"The code of a plugin has changed since cell {min(lost)} was asked for; start the run again.")
    missing = [c for c in every if c.id in only and not finished(store, c)]
    if not missing:
        return
    if group.stage == "audit":
        audit = Audit.of(experiment, experiment.points[group.point], out / "cache")
        _run_audit(audit, group, store, missing)
        return
    fed, trained = attacked(experiment, group, out)
    Bench(experiment, group, store, trained).run(fed, missing)


def _run_audit(audit: Audit, group: Group, store: Store, missing: list[Cell]) -> None:
    try:
        bench = Bench(audit.experiment, group, store, audit.complete().trained)
        bench.audited(Questions(audit), missing)
    except Refused as cause:
        keep_failed(audit.experiment, group, missing, store, str(cause))


def keep_failed(experiment: Experiment, group: Group, missing: Iterable[Cell], store: Store, reason: str) -> None:
    """Keep cells of a group as failed, without any figure of their training."""
    data, model, _ = experiment.facts
    bench = Bench(experiment, group, store, untrained(model.classes, data.test, reason))
    bench.keep_without_figures(missing, "failed", reason)
