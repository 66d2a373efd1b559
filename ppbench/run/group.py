"""How one group of cells (one view, several attacks) is run, scored and kept."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ppbench.adversary.attack import Guess
from ppbench.adversary.victims import Victims, choose_candidates, choose_victims
from ppbench.base.device import device_name
from ppbench.base.errors import Overflow
from ppbench.base.version import __version__
from ppbench.federation.engine import Federation
from ppbench.federation.view import View
from ppbench.metrics.perceptual import measurable, network
from ppbench.questions.base import question_of
from ppbench.questions.inquiry import Inquiry, Model, Probe, Scored, Yardstick
from ppbench.records.aggregate import aggregate
from ppbench.records.schema import (
    Environment,
    Flag,
    Record,
    Tuned,
)
from ppbench.records.store import Store
from ppbench.run.audit.questions import Questions
from ppbench.run.audit.runs import Audit, Refused
from ppbench.run.cells import Cell, Group, cells, finished
from ppbench.run.choice import points
from ppbench.run.config import EvaluateConfig
from ppbench.run.task import Task, make_task
from ppbench.run.train import Trained, federation, train, untrained
from ppbench.run.tuning import rehearsal, tuned


@dataclass
class Bench:
    """Runs the cells of one group and keeps their records."""

    config: EvaluateConfig
    group: Group
    task: Task
    store: Store
    trained: Trained

    def run(self, fed: Federation, missing: list[Cell]) -> None:
        """Probe, attack, score and keep each of `missing`; an attack that fails leaves a record that says so.

        So does a round that leaves the range of what clients can send, though the training before it did not.
        """
        answer, reason = self._records if self.group.records else self._probed, self.trained.utility.reason
        if not self.trained.diverged or self.group.stage == "init":
            try:
                return answer(fed, missing)
            except Overflow as cause:  # before any cell is kept: all of them attack one transcript
                reason = str(cause)
        for cell in missing:
            self._keep(cell, Scored([]), 0.0, status="diverged", reason=reason)

    def _records(self, fed: Federation, missing: list[Cell]) -> None:
        task, config = self.task, self.config
        transcript = fed.observe() if self.group.stage == "iterate" else fed.release()
        view = replace(transcript.view(self.group.threat, own=((-1, task.shards[0]),)), public=task.public)
        draw = partial(choose_candidates, task.shards, task.test, config.candidates, task.seeds)
        model = Model(task.test, config.candidates, fed.outputs, draw)
        for cell in missing:
            self._answered(cell, view, partial(question_of(cell.attack.kind).of_model, model))

    def audited(self, questions: Questions, missing: list[Cell]) -> None:
        """Attack, score and keep each of `missing` on the target of a complete audit."""
        if self.trained.diverged:
            for cell in missing:
                self._keep(cell, Scored([]), 0.0, status="diverged", reason=self.trained.utility.reason)
            return
        view = questions.view(self.group.threat)
        for cell in missing:
            ask = partial(question_of(cell.attack.kind).of_audit, questions)
            self._answered(cell, view, ask, flags=questions.flags())

    def keep_failed(self, cell: Cell, reason: str) -> None:
        """Keep a cell as failed."""
        self._keep(cell, Scored([]), 0.0, reason)

    def _probed(self, fed: Federation, missing: list[Cell]) -> None:
        group, needed = self.group, {c.follows for c in missing} - {None}
        victims = victims_of(self.task, self.config, group)
        transcript = fed.probe(victims.data, self.config.probe, self.config.probe_rounds)
        view = replace(transcript.view(group.threat, own=victims.own), public=self.task.public)
        if group.role:
            victims = victims.playing(group.role, transcript.roles(), self.config.victims)
        if not victims.units:
            for cell in missing:
                self._keep(cell, Scored([]), 0.0, f"no probed client acted as {group.role}")
            return
        given = dict[str, list[Guess]]()
        wanted = {cell.id for cell in missing}
        due = [c for c in cells(self.task, self.config, group) if c.id in wanted or c.attack.name in needed]
        rehearsed = any(cell.tuned for cell in due)  # before any cell is kept: it may leave the range of what is sent
        trial = rehearsal(fed, self.task, self.config, group) if rehearsed else None
        ruler = partial(yardstick_of, self.task, self.config)
        for cell in due:
            began, choice = time.perf_counter(), None
            if trial is not None and cell.tuned:
                label = (cell.attack.name, group.threat, group.stage, group.batch)
                attack, choice = tuned(cell.attack, trial, self.task, label)
                cell = replace(cell, attack=attack)
            earlier = given.get(cell.follows or "", [])
            probe = Probe(cell.attack, view, victims, self.task.seeds, self.task.test, ruler, earlier)
            ask = partial(question_of(cell.attack.kind).of_probe, probe)
            spent, keep = time.perf_counter() - began, cell.id in wanted
            given[cell.attack.name] = self._answered(cell, view, ask, choice=choice, spent=spent, keep=keep)

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
    ) -> list[Guess]:
        """Ask, attack, score and keep one cell; return the guesses, none of an attack that failed.

        spent: seconds that the cell has taken before.
        """
        began = time.perf_counter() - spent
        inquiry = ask()
        guesses, scored, failure = self._attempt(cell, view, inquiry)
        if keep:
            scored = replace(scored, flags=(*scored.flags, *flags))
            self._keep(cell, scored, time.perf_counter() - began, failure, choice=choice, asked=inquiry.digest)
        return guesses

    def _attempt(self, cell: Cell, view: View, inquiry: Inquiry) -> tuple[list[Guess], Scored, str | None]:
        """Run and score an attack. A stranger's may raise, or answer, anything: a failed cell, never a lost run."""
        group, attack = self.group, cell.attack
        generator = self.task.seeds.generator(
            "attack", attack.name, cell.follows or "", group.threat, group.stage, group.batch
        )
        try:
            if question_of(attack.kind).reads and not (attack.evidence(view) or view.defense.evidence(view)):
                # a blind guess must not pass for a defense that holds
                return [], Scored([]), f"attack {attack.name!r}: nothing in the view of {group.threat} can be read"
            guesses = attack.run(view, inquiry.challenges, generator)
            if len(guesses) != len(inquiry.challenges):
                raise ValueError(f"{len(guesses)} guesses to {len(inquiry.challenges)} questions")
            return guesses, inquiry.score(guesses), None
        except Exception as cause:  # noqa: BLE001
            return [], Scored([]), f"attack {attack.name!r}: {type(cause).__name__}: {cause}"

    def _keep(
        self,
        cell: Cell,
        scored: Scored,
        seconds: float,
        failure: str | None = None,
        status: str | None = None,
        reason: str | None = None,
        choice: Tuned | None = None,
        asked: str | None = None,
    ) -> None:
        task = self.task
        state = status or ("failed" if failure else "complete")
        delta = self.trained.privacy.delta
        metrics = aggregate(scored.victims, classes=task.plan.spec.classes, seed=self.config.seed, delta=delta)
        record = Record(
            cell_id=cell.id,
            config=cell.config,
            victims=scored.victims,
            metrics=metrics if scored.victims else [],
            utility=self.trained.utility,
            cost=self.trained.cost,
            privacy=self.trained.privacy,
            played=self.trained.played,
            tuned=choice,
            asked=asked,
            flags=list(scored.flags),
            status=state,  # type: ignore[arg-type]  # one of the three
            reason=failure or reason,
            environment=environment(self.config),
        )
        self.store.save(record, seconds=seconds, tensors=_images(scored))


def victims_of(task: Task, config: EvaluateConfig, group: Group) -> Victims:
    """Return the victims of a group, of all roles. Raises UsageError where clients have too few examples."""
    defense = points(config)[group.point].defense
    roles = len(defense.roles) if group.role else 1
    return choose_victims(
        task.shards, group.threat, group.batch, config.victims, task.seeds, sums=defense.sums, roles=roles
    )


def yardstick_of(task: Task, config: EvaluateConfig) -> Yardstick:
    """Return what reconstructions of a task are measured with: the public (else test) mean, the feature network."""
    seen = task.test if task.public is None else task.public
    images = measurable(task.plan.spec.shape)
    return Yardstick(seen.x.mean(0).cpu(), network(config.weights) if images else None)


def _images(scored: Scored) -> dict[str, Tensor] | None:
    if scored.guess is None or scored.truth is None or scored.guess.dim() != 4:
        return None
    return {"guess": scored.guess, "truth": scored.truth}


def environment(config: EvaluateConfig) -> Environment:
    """Return where this process runs."""
    return Environment(
        ppbench=__version__,
        python=platform.python_version(),
        torch=torch.__version__,
        device=device_name(config.device),
        threads=torch.get_num_threads(),
        dtype="float32",
    )


def run_group(config: EvaluateConfig, group: Group, out: Path, only: Container[str]) -> None:
    """Run those cells of `group` whose names are in `only` and that `out` does not hold complete or diverged."""
    task, store = make_task(config), Store(out)
    missing = [c for c in cells(task, config, group) if c.id in only and not finished(store, c)]
    if not missing:
        return
    point = points(config)[group.point]
    if group.stage == "audit":
        _run_audit(Audit.of(task, point, config, out / "cache"), group, store, missing)
        return
    fed, trained = train(task, point, config, out / "cache")
    if group.stage == "init":
        fed = federation(task, point, config)
        fed.start(task.params)
    Bench(config, group, task, store, trained).run(fed, missing)


def _run_audit(audit: Audit, group: Group, store: Store, missing: list[Cell]) -> None:
    """Train what the audit still lacks and run its missing cells; a defense that refuses the audit fails them."""
    config, task = audit.config, audit.task
    try:
        bench = Bench(config, group, task, store, audit.complete().trained)
        bench.audited(Questions(audit), missing)
    except Refused as cause:
        keep_failed(config, group, missing, store, str(cause))


def keep_failed(config: EvaluateConfig, group: Group, missing: Iterable[Cell], store: Store, reason: str) -> None:
    """Keep cells of a group as failed, without any figure of their training."""
    task = make_task(config)
    bench = Bench(config, group, task, store, untrained(task, reason))
    for cell in missing:
        bench.keep_failed(cell, reason)
