"""The trainings of an audit at one point, its target and its reference runs: done once, kept by content.

    OUT/cache/audit-<hash>/target/                       checkpoint, target.json, and rounds.safetensors: all its mail
    OUT/cache/audit-<hash>/references-1-8.safetensors    outputs of the models of runs 1 to 8

Each appears whole or not at all, so that a killed evaluation resumes with the others.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from ppbench.adversary.augment import augmentations
from ppbench.base.errors import Overflow, UsageError
from ppbench.base.files import make_folder, publish_folder, write_atomic
from ppbench.base.seals import packed_with_digest, seal, unpacked_with_digest, unsealed
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params, nbytes
from ppbench.base.version import __version__
from ppbench.federation.drive import chosen_backend
from ppbench.federation.engine import Federation, run_many
from ppbench.federation.wire import session_of
from ppbench.records.schema import Strict
from ppbench.run.audit.clients import CanaryClients, make_canary_clients
from ppbench.run.audit.population import Population, needs_level, populate
from ppbench.run.audit.rounds import Recorder
from ppbench.run.choice import Point
from ppbench.run.cost import measured_client, peak_memory
from ppbench.run.experiment import Experiment
from ppbench.run.train import TrainingResult, curve_figure, figures_of

AUGMENTATIONS = 2
"""Copies of each candidate on which references are evaluated: itself and its mirror image."""
MEMORY = 2**30
"""Bytes that concurrent reference runs of a process may take on a CPU; on a GPU, half of its memory."""
MOST_AT_ONCE = {"cpu": 8, "cuda": 64}
"""Most concurrent reference runs: so many are lost when a run is killed."""
TARGET, TARGET_FILE = range(1), "target.json"


class Refused(UsageError):
    """An audit that cannot be made: the defense does not accept its shards, or there is no such view."""


class AuditTarget(Strict):
    """The trained target. at_once: number of concurrent reference runs; rounds: those whose mail is kept."""

    trained: TrainingResult
    at_once: int
    rounds: tuple[int, ...]


@dataclass(frozen=True)
class PointAudit:
    """An audit of one point of an experiment. home: folder of its results."""

    experiment: Experiment
    point: Point
    home: Path

    @staticmethod
    def of(experiment: Experiment, point: Point, cache: Path) -> PointAudit:
        """Return the audit of `point`, kept under `cache` by the hash of everything that determines it."""
        info, config = point.info, experiment.config
        parts = [part.model_dump(mode="json") for part in experiment.facts]
        about = [__version__, info.id, info.edition, info.parameters, *parts, config.seed]
        riders = [config.canary_clients] if config.canary_clients else []
        text = json.dumps([*about, config.candidates, config.canaries, AUGMENTATIONS, *riders], sort_keys=True)
        return PointAudit(experiment, point, cache / f"audit-{hashlib.sha256(text.encode()).hexdigest()[:32]}")

    @cached_property
    def population(self) -> Population:
        """Who is in which run; the same at every point, except for defenses that need equal shards."""
        population = populate(self.experiment)
        level = needs_level(self.point.defense, self.experiment.task.plan, list(population.sizes.values()))
        return replace(population, level=level)

    @cached_property
    def clients(self) -> CanaryClients:
        """The canary clients of the target. Raises Refused: there are none, or the defense cannot have any."""
        if not self.experiment.config.canary_clients:
            raise Refused("This audit has no canary clients; add --canary-clients 100.")
        try:
            return make_canary_clients(self.experiment, self.point.defense, self.population.shards(0))
        except UsageError as cause:
            raise Refused(str(cause)) from cause

    @property
    def target_folder(self) -> Path:
        """The folder of the finished target."""
        return self.home / "target"

    @property
    def target(self) -> AuditTarget | None:
        """The trained target, None if it is still to be trained."""
        try:
            return AuditTarget.model_validate_json(json.dumps(unsealed(self.target_folder / TARGET_FILE, files=False)))
        except (UsageError, ValueError):
            return None

    def federation(self, run: int) -> Federation:
        """Return the federation of a run, not yet started: 0 is the target; draws depend on its number alone."""
        task, config, shards = self.experiment.task, self.experiment.config, self.population.shards(run)
        seeds = Seeds(task.seeds.seed("reference", run) if run else task.seeds.seed("audited"))
        session, device = "real" if run else session_of(-1), torch.device(config.device)
        plan, defense, canaries = task.plan, self.point.defense, dict[int, Params]()
        if not run and config.canary_clients:
            plan, shards = self.clients.plan(plan), self.clients.shards(shards)
            canaries = self.clients.gradients(device)
        return Federation(defense, plan, shards, seeds, device, config.backend, session=session, canaries=canaries)

    def start(self, run: int) -> Federation:
        """Return the federation of a run after set-up. Raises Refused: the defense does not accept its shards."""
        fed = self.federation(run)
        try:
            fed.start(self.experiment.task.params)
        except UsageError as cause:
            raise Refused(f"The audit cannot train {self.point.label}: {cause}") from cause
        return fed

    def parts(self) -> list[range]:
        """Return the reference runs in parts that run concurrently; [] if the target is missing."""
        target, last = self.target, self.experiment.config.references
        if target is None:
            return []
        return [range(first, min(first + target.at_once, last + 1)) for first in range(1, last + 1, target.at_once)]

    def path(self, part: range) -> Path:
        """Return the file of a part of the references."""
        return self.home / f"references-{part.start}-{part.stop - 1}.safetensors"

    def missing(self) -> list[range]:
        """Return the parts still to be run: `TARGET` alone, or references; [] at the end or if the target diverged."""
        target = self.target
        if target is None:
            return [TARGET]
        return [] if target.trained.diverged else [part for part in self.parts() if not self.path(part).is_file()]

    def run(self, part: range, after: Callable[[int], None] | None = None) -> None:
        """Train a missing part and keep its results; `after` is called with each round of each run."""
        if part == TARGET:
            _train_target(self, after)
            return
        make_folder(self.home)
        write_atomic(self.path(part), packed_with_digest(_train_references(self, part, after)))

    def complete(self) -> AuditTarget:
        """Run all missing parts and return the target. Raises Refused, or UsageError of a full disk."""
        try:
            if self.target is not None:
                unsealed(self.target_folder / TARGET_FILE)
        except UsageError as damage:
            warnings.warn(f"The target of an audit cannot be used ({damage}); it is trained again.", stacklevel=2)
            self.run(TARGET)
        while missing := self.missing():
            self.run(missing[0])
        target = self.target
        assert target is not None  # or it would be missing
        return target

    def restore(self) -> Federation:
        """Return the federation of the trained target. Raises UsageError: its checkpoint cannot be read."""
        fed = self.federation(0)
        fed.restore(self.target_folder, self.experiment.task.params)
        return fed

    def answers(self) -> dict[str, Tensor]:
        """Return the answers of all references, as `_train_references`, run by run; {} if there are none."""
        results = []
        for part in self.parts():
            try:
                results.append(unpacked_with_digest(self.path(part)))
            except UsageError as damage:
                warnings.warn(f"Reference runs cannot be used ({damage}); they are done again.", stacklevel=2)
                self.path(part).unlink(missing_ok=True)
                self.run(part)
                results.append(unpacked_with_digest(self.path(part)))
        return {name: torch.cat([one[name] for one in results]) for name in results[0]} if results else {}


def _train_target(audit: PointAudit, after: Callable[[int], None] | None) -> None:
    fed, task, last = audit.start(0), audit.experiment.task, audit.experiment.config.rounds
    peak, at_once = _room(audit, fed)
    recorder = Recorder(fed, last)

    def watch(round_: int) -> None:
        recorder(round_)
        if after is not None:
            after(round_)

    finished = fed.run(last, watch)
    figure = curve_figure(fed, task) if finished else math.nan
    trained = figures_of(fed, task, [(fed.round, figure)] if math.isfinite(figure) else [], finished, peak)
    target = AuditTarget(trained=trained, at_once=at_once, rounds=recorder.rounds)

    def write(draft: Path) -> None:
        fed.save(draft)
        if not target.trained.diverged:
            recorder.save(draft / "rounds.safetensors")
        seal(draft, TARGET_FILE, target.model_dump(mode="json"))

    publish_folder(audit.target_folder, write)


def _room(audit: PointAudit, fed: Federation) -> tuple[int | None, int]:
    """Return the peak bytes of a client's computation, None if round 1 overflows, and the number of concurrent runs."""
    kind = "cuda" if fed.device.type == "cuda" else "cpu"
    if chosen_backend(fed.backend if fed.defense.mappable else "loop", fed.device, fed.plan) == "loop":
        try:
            return peak_memory(measured_client(fed)), 1
        except Overflow:
            return None, 1
    try:
        client = measured_client(fed, max(fed.shards, key=lambda c: len(fed.shards[c].x)))
        peak = peak_memory(client)
    except Overflow:
        return None, 1
    clients = 1 if fed.plan.schedule == "round_robin" else fed.plan.clients
    each = clients * (peak + max((nbytes(job) for job in client.jobs()), default=0)) + nbytes(dict(fed.shards))
    bound = MEMORY if kind == "cpu" else torch.cuda.get_device_properties(fed.device).total_memory // 2
    return peak, max(1, min(MOST_AT_ONCE[kind], bound // max(1, each)))


def _train_references(audit: PointAudit, part: range, after: Callable[[int], None] | None) -> dict[str, Tensor]:
    """Return "finished" [R] bool, "outputs" [R, A, Q, C], "population" [R, Z, C] float64, NaN where a run diverged."""
    candidates, others = augmentations(audit.population.candidates.x, AUGMENTATIONS), audit.population.others.x
    runs = [audit.start(run) for run in part]
    finished = run_many(runs, audit.experiment.config.rounds, after)
    outputs = [fed.outputs(candidates.flatten(0, 1)).unflatten(0, candidates.shape[:2]) for fed in runs]
    population = [fed.outputs(others) for fed in runs]
    good = torch.tensor([end and bool(own.isfinite().all()) for end, own in zip(finished, outputs, strict=True)])
    answers = {"outputs": torch.stack(outputs), "population": torch.stack(population)}
    for values in answers.values():
        values[~good] = torch.nan
    return {"finished": good, **answers}
