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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from ppbench.adversary.attack import Challenge, References
from ppbench.adversary.victims import Candidates, PlantedSecret, augmentations, planted_secrets, tensors_digest
from ppbench.base import tree
from ppbench.base.autodiff import gradient
from ppbench.base.errors import Overflow, UsageError
from ppbench.base.files import make_folder, publish_folder, write_atomic
from ppbench.base.seeds import Seeds
from ppbench.base.tensor_files import packed_with_digest, seal, unpacked_with_digest, unsealed
from ppbench.base.tree import Params, Tree, leaves, nbytes
from ppbench.base.version import __version__
from ppbench.federation.contract import Defense
from ppbench.federation.drive import chosen_backend
from ppbench.federation.engine import Federation, run_many
from ppbench.federation.plan import Data, Layout, Plan
from ppbench.federation.threats import ThreatModel, threat_model
from ppbench.federation.view import BEGUN, StateRecord, Transcript, View, tuples_of
from ppbench.federation.wire import SERVER, Envelope, session_of
from ppbench.metrics.modality import Modality, modality_in
from ppbench.questions.membership import AVERAGE
from ppbench.records.schema import Flag, Strict
from ppbench.run.audit.population import ADVERSARY, Population, has_view, needs_level, populate
from ppbench.run.cost import measured_client, peak_memory
from ppbench.run.detection import audit_flags
from ppbench.run.experiment import Experiment, Point
from ppbench.run.train import TrainingResult, curve_figure, figures_of

# -- Canary clients (Andrew et al., ICLR 2024): clients of an audit's target whose gradient is a random direction --


@dataclass(frozen=True)
class CanaryClients:
    """Random directions, half of which are the gradients of clients in the training.

    Attributes:
        start: [P] float32, the public initial weights.
        directions: [2k, P] float32, random unit vectors. inside: [2k] bool, the truth: which k of them take part.
        first: index of the first canary client; they come after all others. size: norm of their gradients.
        shard: the data of each of them. Its inputs are never used; its size counts in the server's mean.
    """

    start: Tensor
    directions: Tensor
    inside: Tensor
    first: int
    size: float
    shard: Data
    layout: Layout

    def plan(self, plan: Plan) -> Plan:
        """Return `plan` with the canary clients added."""
        return replace(plan, clients=self.first + int(self.inside.sum()))

    def gradients(self, device: torch.device) -> dict[int, Params]:
        """Return the gradient of each canary client, by its index."""
        rows = (self.size * self.directions[self.inside]).to(device)
        return {self.first + place: self.layout.unpack(row) for place, row in enumerate(rows)}

    def shards(self, others: Mapping[int, Data]) -> dict[int, Data]:
        """Return the shards of all clients."""
        return {**others, **dict.fromkeys(range(self.first, self.first + int(self.inside.sum())), self.shard)}

    def challenge(self) -> Challenge:
        """Return the question of which directions took part."""
        return Challenge((), 1, extra={"directions": self.directions.clone(), "start": self.start.clone()})

    def digest(self) -> str:
        """Return the hash of the question with its answers."""
        return tensors_digest(self.start, self.directions, self.inside)


def takes_canaries(defense: Defense, plan: Plan, examples: int, rounds: int) -> bool:
    """Return whether clients of `defense` upload the gradient of the plan's loss, or nothing that depends on data."""
    kind = type(defense)
    if kind.round is not Defense.round or kind.prepare is not Defense.prepare:
        return False
    return kind.compute is Defense.compute or defense.guarantee(plan, examples, rounds) == (0.0, 0.0)


def make_canary_clients(experiment: Experiment, defense: Defense, shards: Mapping[int, Data]) -> CanaryClients:
    """Return the canary clients of an audit's target whose other clients hold `shards`.

    Their gradients have the mean norm of honest clients' at the initial weights, or the defense's clipping norm
    `clip` if that is larger. Raises UsageError: the defense's clients compute something else.
    """
    task, config = experiment.task, experiment.config
    examples = max(1, round(sum(len(data.x) for data in shards.values()) / len(shards)))
    if not takes_canaries(defense, task.plan, examples, config.rounds):
        raise UsageError(
            f"Option canary_clients={config.canary_clients} cannot be used: clients of defense {defense.name!r} upload "
            "more than the gradient of a loss, so none can upload a direction; leave it out."
        )
    layout, count = Layout.of(task.params), 2 * config.canary_clients
    generator = Seeds(task.seeds.seed("audit")).generator("canary clients")
    inside = torch.zeros(count, dtype=torch.bool)
    inside[torch.randperm(count, generator=generator)[: count // 2]] = True
    start = layout.pack(task.params).float().cpu()
    drawn = torch.randn(count, len(start), generator=generator)
    norms = []
    for data in shards.values():
        ones = torch.ones(len(data.x))
        with torch.no_grad():
            slope = gradient(lambda p, d=data, w=ones: task.plan.objective(p, d.x, d.y, w), task.params)  # type: ignore[misc]
        norms.append(float(layout.pack(slope).norm()))
    size = max(sum(norms) / len(norms), float(getattr(defense, "clip", 0.0)))
    shape = next(iter(shards.values()))
    shard = Data(torch.zeros(examples, *shape.x.shape[1:]), torch.zeros(examples, *shape.y.shape[1:]))
    directions = drawn / drawn.norm(dim=1, keepdim=True)
    return CanaryClients(start, directions, inside, len(shards), size, shard, layout)


# -- The mail of all rounds of a training, or of evenly spaced ones: a defense must face more than one round --

LIMIT = 512 * 2**20
"""Bytes of mail and server states that a transcript may have."""


@dataclass
class Recorder:
    """Keeps rounds of a just started federation up to `last`: pass it to `Federation.run` as `after`.

    limit: bytes, of which the first round's size tells how many rounds fit; rounds: those kept.
    """

    federation: Federation
    last: int
    limit: int = LIMIT
    rounds: tuple[int, ...] = ()
    mail: list[Envelope] = field(default_factory=list)
    states: list[StateRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.federation.wire.keep = True

    def __call__(self, round_: int) -> None:
        """Take over the mail of `round_` and the server's states, and set whether the next round is kept."""
        fed = self.federation
        self.mail += fed.wire.mail
        self.states += [_light(state) for state in fed.states if state.party == SERVER]
        fed.wire.mail.clear()
        fed.states.clear()
        if not self.rounds:
            size = _size([letter.message for letter in self.mail] + [state.state for state in self.states])
            self.rounds = spaced_rounds(self.last, self.limit // max(1, size))
        fed.wire.keep = round_ + 1 in self.rounds

    def save(self, path: Path) -> None:
        """Write the kept rounds, then the delivered model as one more broadcast, to `path`."""
        fed = self.federation
        final = [replace(letter, round=fed.round + 1) for letter in fed.release().mail]
        tree.save_tree(with_shared_tensors((tuples_of(self.mail + final), tuples_of(self.states))), path)


def spaced_rounds(last: int, count: int) -> tuple[int, ...]:
    """Return `count` of the rounds 1 to `last`, evenly spaced with both ends; all if there are no more, (1,) for 0."""
    if count >= last:
        return tuple(range(1, last + 1))
    if count < 2:
        return (1,)
    return tuple(1 + round(index * (last - 1) / (count - 1)) for index in range(count))


def load_recorded(fed: Federation, path: Path) -> Transcript:
    """Return the transcript that a `Recorder` of `fed` wrote to `path`. Raises UsageError where it cannot be read."""
    mail, states = tree.load_tree(path)
    letters, records = (Envelope(*letter) for letter in mail), (StateRecord(*record) for record in states)
    return Transcript(fed.plan, fed.defense, tuple(letters), tuple(records))


def _size(trees: list[Tree]) -> int:
    return nbytes(list({id(leaf): leaf for one in trees for leaf in leaves(one)}.values()))


def with_shared_tensors(value: Tree) -> Tree:
    """Return `value` with equal tensors made one object, which files hold once: every client receives the model."""
    seen: dict[tuple[object, ...], Tensor] = {}

    def first(leaf: Tensor) -> Tensor:
        content = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return seen.setdefault((hashlib.sha256(content).digest(), leaf.dtype, tuple(leaf.shape)), leaf)

    return tree.tree_map(first, value)


def _light(record: StateRecord) -> StateRecord:
    """Return a state in the form that is kept: only the session at a round's beginning, as its first step has the
    weights."""
    if record.step != BEGUN:
        return record
    begun = record.state
    return replace(record, state=replace(begun, server=(), draws=begun.draws[:0], secret=begun.secret[:0]))


AUGMENTATIONS = 2
"""Copies of each candidate on which references are evaluated: itself and its mirror image."""
MEMORY = 2**30
"""Bytes that concurrent reference runs of a process may take on a CPU; on a GPU, half of its memory."""
MOST_AT_ONCE = {"cpu": 8, "cuda": 64}
"""Most concurrent reference runs: so many are lost when a run is killed."""
TARGET, TARGET_FILE = range(1), "target.json"
PUBLIC_REFERENCES = "references_public", "the reference runs were trained on public examples and the kept candidates"
SAME_BASE_REFERENCES = (
    "references_same_base",
    "the reference runs were trained on the target's own other records and the kept candidates: the adversary knows "
    "all",
)
"""Code and words of the flag that says on what the references were trained."""


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
        riders: list[object] = [config.canary_clients] if config.canary_clients else []
        families = modality_in(experiment.task.plan).canary_families
        riders += [families] if families != Modality.canary_families else []
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

    # -- the attacks' input once the audit is complete: views of the target, and challenges with references --
    @property
    def candidates(self) -> Candidates:
        """The truth about the candidates, for the scorer."""
        return self.population.candidates

    def view(self, threat: ThreatModel | str) -> View:
        """Return the view of `threat`: a client's is the delivered model, others add the mail of all kept rounds.

        Raises Refused: the view of other clients than the audit's own, whose states are not kept.
        """
        threat = threat_model(threat)
        if not has_view(threat):
            raise Refused(f"An audit keeps no clients' states, so it has no view of {threat}; leave it out.")
        fed = self.restore()
        if not threat.sees_uploads:
            view = fed.release().view(threat, own=((-1, self.population.shards(0)[ADVERSARY]),))
        else:
            view = load_recorded(fed, self.target_folder / "rounds.safetensors").view(threat)
        return replace(view, public=self.experiment.task.public)

    @cached_property
    def references(self) -> tuple[References | None, int]:
        """The reference runs, or None, and how many were left out: each that diverged, with its complement."""
        answers, others = self.answers(), self.population.others
        if not answers:
            return None, 0
        pairs = answers["finished"].view(-1, 2).all(1).repeat_interleave(2)
        dropped = int((~pairs).sum())
        if not pairs.any():
            return None, dropped
        outputs, population = answers["outputs"][pairs], answers["population"][pairs]
        keep = self.population.keep[1:][pairs]
        return References(keep, outputs, others.y.clone(), others.x.clone(), population), dropped

    def challenges(self) -> list[Challenge]:
        """Return the membership questions about either half, with the references."""
        references, _ = self.references
        return [self.candidates.challenge(half, references) for half in (0, 1)]

    def secrets(self) -> list[PlantedSecret]:
        """Return the canaries that hold a secret. Raises Refused: there are none."""
        seeds = Seeds(self.experiment.task.seeds.seed("audit"))
        planted = planted_secrets(self.candidates, self.experiment.task.plan, seeds)
        if not planted:
            raise Refused("No canary of this audit holds a name or a number; give more --canaries.")
        return planted

    def tracing(self) -> tuple[Challenge, Tensor]:
        """Return the question of who holds each member, and the owners [members] int64, for the scorer alone."""
        inside = self.population.keep[0]
        x, labels = self.candidates.x[inside], self.candidates.labels[inside]
        return Challenge((), 1, x=x, labels=labels), self.population.owner[inside]

    @cached_property
    def noticed(self) -> tuple[Flag, ...]:
        """A flag if clients behave otherwise because they hold canaries."""
        average = torch.tensor([family == AVERAGE for family in self.candidates.family])
        keep = self.population.keep & average
        return audit_flags(self.restore(), replace(self.population, keep=keep).shards(0))

    def flags(self) -> tuple[Flag, ...]:
        """Return what a reader must know about the audit."""
        config, flags = self.experiment.config, [*self.noticed]
        references, dropped = self.references
        if references is not None:
            code, detail = PUBLIC_REFERENCES if self.population.public else SAME_BASE_REFERENCES
            flags.append(Flag(code=code, severity="info", detail=detail))
        if dropped:
            detail = f"{dropped} of {config.references} reference runs were left out: they or their pairs diverged"
            flags.append(Flag(code="references_diverged", severity="warning", detail=detail))
        target = self.target
        if target is not None and 0 < len(target.rounds) < config.rounds:
            detail = f"the mail of {len(target.rounds)} evenly spaced rounds of {config.rounds} was kept"
            flags.append(Flag(code="rounds_thinned", severity="info", detail=detail))
        if config.canary_clients:
            detail = f"{config.canary_clients} clients whose gradients are random directions took part in the target"
            flags.append(Flag(code="canary_clients", severity="info", detail=detail))
        return tuple(flags)


def _train_target(audit: PointAudit, after: Callable[[int], None] | None) -> None:
    fed, task, last = audit.start(0), audit.experiment.task, audit.experiment.config.rounds
    peak, at_once = _room(fed)
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


def _room(fed: Federation) -> tuple[int | None, int]:
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
    count = AUGMENTATIONS if modality_in(audit.experiment.task.plan).smooth else 1
    candidates, others = augmentations(audit.population.candidates.x, count), audit.population.others.x
    runs = [audit.start(run) for run in part]
    finished = run_many(runs, audit.experiment.config.rounds, after)
    outputs = [fed.outputs(candidates.flatten(0, 1)).unflatten(0, candidates.shape[:2]) for fed in runs]
    population = [fed.outputs(others) for fed in runs]
    good = torch.tensor([end and bool(own.isfinite().all()) for end, own in zip(finished, outputs, strict=True)])
    answers = {"outputs": torch.stack(outputs), "population": torch.stack(population)}
    for values in answers.values():
        values[~good] = torch.nan
    return {"finished": good, **answers}
