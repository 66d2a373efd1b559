"""The line that all data take, on one page: options are checked, missing cells computed, results reported.

`schedule` and `group` hold the middle of it (`train`, `Federation.probe`, `Transcript.view`, `Attack.run`, `score`).
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import torch

from ppbench.adversary.victims import choose_candidates, choose_victims
from ppbench.base.bars import Bars
from ppbench.base.device import check_device, computing, one_thread
from ppbench.base.errors import UsageError, shown
from ppbench.base.fence import check_answers, guard, third_party
from ppbench.base.registry import close_attacks, load_plugin
from ppbench.base.version import __version__
from ppbench.claims.check import PAPER_CLAIMS
from ppbench.federation.contract import Defense, answer_faults
from ppbench.federation.engine import Federation
from ppbench.federation.threats import HONEST_SERVER, THREATS
from ppbench.metrics.modality import modality_in
from ppbench.metrics.perceptual import check_weights
from ppbench.questions.images import score_images
from ppbench.records.run_files import (
    SelftestTrial,
    Soundness,
    keep_salt,
    salt_of,
    save_origin,
    save_soundness,
    soundness_of,
    time_of,
)
from ppbench.records.schema import Record, Scalar
from ppbench.records.sources import source_digest, warn_changed
from ppbench.records.store import Store
from ppbench.report.controls import Check, check_harness
from ppbench.report.findings import Verdict
from ppbench.report.leak import skipped_sentences, solved_sentence
from ppbench.report.page.board import up_to_date, write_board
from ppbench.report.page.headline import Answer, answer_of
from ppbench.report.verdict import verdicts
from ppbench.run.audit.population import populate
from ppbench.run.cells import CellGroup, groups, inapplicable, runs_in
from ppbench.run.config import EvaluateConfig, configure
from ppbench.run.executors import check_workers, default_workers, make_executor
from ppbench.run.experiment import Experiment, make_defense, resolve
from ppbench.run.group import drafts_of, tuning_victims
from ppbench.run.jobs import Executor
from ppbench.run.scene import group_victims
from ppbench.run.schedule import (
    PlannedCells,
    Scheduler,
    count_cells,
    ended_cells,
    in_first_answer,
    plan_cells,
    strands,
    unfinished,
)
from ppbench.run.task import Task, check_clients, make_task
from ppbench.task.dataset import check_content

# -- The self-test: DLG must break an undefended sigmoid LeNet, and algebra a first linear layer --
# If one is not broken, something between training and scoring is wrong (a sign, another loss, a wrong view), and no
# result of the harness counts. The test runs where cells are computed; its outcome is kept beside them.

VICTIMS = 2


@dataclass(frozen=True)
class SelfTestSubject:
    """A network and the attack that must break it, on the embedded digits."""

    model: str
    attack: str
    options: tuple[tuple[str, Scalar], ...] = ()


DLG_OPTIONS = (("label", "inferred"), ("restarts", 0), ("stop", 1e-5), ("budget", 600))
SUBJECTS = (SelfTestSubject("lenet", "dlg", DLG_OPTIONS), SelfTestSubject("mlp", "analytic"))


def share_broken(subject: SelfTestSubject) -> float:
    """Return the share of victims that are rebuilt, by the same code as in every evaluation."""
    task: Task = make_task(configure(defense="none", model=subject.model, clients=2, train=40, seed=0))
    federation = Federation(make_defense("none"), task.plan, task.shards, task.seeds)
    federation.start(task.params)
    victims = choose_victims(task.shards, HONEST_SERVER, 1, VICTIMS, task.seeds)
    view = federation.probe(victims.data).view(HONEST_SERVER)
    attack = load_plugin("attacks", subject.attack)(**dict(subject.options))
    guesses = attack.run(view, victims.challenges(), torch.Generator().manual_seed(0))
    scores = score_images(victims, guesses, {}, {}, task.plan.data_range).victims
    return sum(map(modality_in(task.plan).rebuilt, scores)) / len(scores)


@lru_cache(maxsize=1)
def selftest() -> Soundness:
    """Attack both networks (three seconds, once per process) and return the outcome; an error counts as unbroken."""
    trials = []
    for subject in SUBJECTS:
        try:
            with one_thread():  # workers are busy beside it
                share, error = share_broken(subject), ""
        except Exception as cause:  # noqa: BLE001 - whatever breaks here is what this test is for
            share, error = 0.0, f"{type(cause).__name__}: {cause}"
        trials.append(SelftestTrial(model=subject.model, attack=subject.attack, share=share, error=error))
    return Soundness(
        ppbench=__version__,
        code=source_digest(),
        torch=str(torch.__version__),
        python=platform.python_version(),
        trials=trials,
    )


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of a run into folder `out`: its cells, and the summary, reported first.

    computed: number of cells that ran in this call.
    """

    records: tuple[Record, ...]
    answer: Answer
    out: Path
    computed: int

    @property
    def checks(self) -> tuple[Check, ...]:
        """The checks of the harness: the controls of each evaluation, and the self-test."""
        return self.answer.trust.checks

    @property
    def reliable(self) -> bool:
        """Whether something can be concluded: see `Trust.reliable`."""
        return self.answer.trust.reliable


@dataclass(frozen=True, kw_only=True)
class Evaluation(RunResult):
    """The result of an evaluation, with the verdicts.

    notes: how the data were read; inapplicable: what can use none of the requested threat models, in sentences.
    """

    config: EvaluateConfig
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...] = ()
    inapplicable: tuple[str, ...] = ()

    @property
    def verdict(self) -> tuple[str, ...]:
        """The verdicts, in sentences."""
        return tuple(verdict.sentence for verdict in self.verdicts)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Attacks that cannot run; searches skipped as nothing is left to find, or as `none` withstands them too."""
        solved = solved_sentence(self.records) if "quick" in self.config.attacks else None
        return *self.inapplicable, *filter(None, [solved]), *skipped_sentences(self.config.defense, self.records)


@guard()
@computing()
def evaluate(
    config: EvaluateConfig | None = None,
    *,
    out: Path | str = "ppbench-results",
    workers: int | None = None,
    progress: Bars | None = None,
    command: str = "",
    preset: str = "quick",
    **options: object,
) -> Evaluation:
    """Evaluate a defense: train it and the controls, attack what each party saw, score, record, write the board.

    A cell that `out` already holds is not computed again; a run that was killed resumes.

    config: the evaluation, or give `preset` and the fields of `EvaluateConfig` as keywords (defense="spn"). out: folder
    of results, new or made by ppbench. workers: processes; by default one a core, and one where a GPU is used.
    progress: receives how far the work is. command: as typed, for `origin.json`. Raises UsageError: an option cannot
    be used; nothing has been trained then.
    """
    config = config if config is not None else configure(preset, **options)
    return _evaluate(config, Path(out), workers, progress or Bars(quiet=True), command)


def _evaluate(config: EvaluateConfig, out: Path, workers: int | None, progress: Bars, command: str) -> Evaluation:
    if config.isolate:
        close_attacks()
    check_workers(workers)
    store = Store(out)
    if config.isolate and not config.salt:
        config = config.model_copy(update={"salt": salt_of(store.out)})
    experiment = resolve(config)
    check_experiment(experiment)
    prepare_results(store, config.salt)
    plan = plan_cells([experiment])
    todo = unfinished(plan, store)
    executor = local_executor(workers, config.device, progress)
    first = [cell.id for one in plan if in_first_answer(experiment, one.group) for cell in one.cells]
    computed = compute(plan, todo, store, executor, progress, strict=True, first=first, command=command)
    records, answer = report_results(store, plan, computed)
    return Evaluation(
        config=config,
        records=records,
        verdicts=tuple(verdicts(config.defense, records)),
        answer=answer,
        out=store.out,
        computed=len(ended_cells(todo, store)),
        notes=experiment.notes,
        inapplicable=tuple(inapplicable(experiment)),
    )


def prepare_results(store: Store, salt: str) -> None:
    """Make a folder of results ready for a run, with its secret, unless "" (UsageError: it must not be written)."""
    store.prepare()
    keep_salt(store.out, salt)
    store.sweep()


def local_executor(workers: int | None, device: str, progress: Bars) -> Executor:
    """Return the executor of this machine; a single worker is this process."""
    count = workers or default_workers(device)
    return make_executor("inline" if count == 1 else "local", count, partial(progress.advance, "training"))


def report_results(store: Store, planned: Sequence[PlannedCells], computed: bool) -> tuple[tuple[Record, ...], Answer]:
    """Write the board if it is old, and return the records of a run that has ended, with the summary."""
    if computed or not up_to_date(store, PAPER_CLAIMS):
        write_board(store, PAPER_CLAIMS)
    records = tuple(store.load(cell) for cell in ended_cells(planned, store))
    return records, answer_of(records, check_harness(soundness_of(store)), partial(time_of, store.out))


@guard()
def check_experiment(experiment: Experiment) -> None:
    """Refuse an experiment that cannot be run (UsageError), before anything is written."""
    config = experiment.config
    check_device(config.device)
    task = experiment.task
    check_weights(config.weights, task.plan.spec.shape)
    every = list(groups(experiment))
    _check_threats(experiment, every)
    for point in experiment.points:
        _check_defense(point.defense, experiment)
    smallest = min(config.batch_size, *config.attack_batch)
    if smallest < task.plan.net.fewest:
        raise UsageError(
            f"Model {shown(config.model)} has a batch norm that sees one value of an example, so batches of {smallest} "
            f"have no statistics; use batches of {task.plan.net.fewest} and more, larger images, or --set "
            "model.norms=running."
        )
    if task.dataset.data_range[0] == task.dataset.data_range[1]:
        raise UsageError(
            f"Data set {shown(config.dataset)} holds one and the same value everywhere; there is nothing to find."
        )
    check_content(task.dataset)
    _ = experiment.notes  # cached now: a process holds few tasks
    inputs = {client: shard.x for client, shard in task.shards.items()}
    for attack in experiment.attacks:
        if not third_party("attacks", attack.name):  # others were checked when they were resolved
            attack.check_held(inputs)
    if any(group.stage == "audit" for group in every):
        populate(experiment)
    drawn: dict[Hashable, CellGroup] = {}
    for group in (g for g in every if g.stage != "audit"):  # victims are the same at every point and stage
        defense = experiment.points[group.point].defense
        drawn.setdefault((replace(group, point=0, stage="init"), defense.sums, len(defense.roles)), group)
    for group in drawn.values():
        _check_victims(experiment, group)


def _check_threats(experiment: Experiment, every: Sequence[CellGroup]) -> None:
    stages, reasons = experiment.config.stages, " ".join(inapplicable(experiment))
    audits = "audit" in stages and any(runs_in(attack, "audit", True) for attack in experiment.attacks)
    if audits and not any(group.stage == "audit" for group in every):
        raise UsageError(f"No attack can be asked in an audit; leave out --stage audit, or change --threat. {reasons}")
    if not every:
        blind = " or ".join(threat.name for threat in THREATS.values() if not threat.sees_uploads)
        raise UsageError(
            "There is nothing to evaluate: membership and extraction attacks need --stage final, and gradient attacks "
            f"on a defense that perturbs the model need another --threat than {blind}. {reasons}".strip()
        )


def _check_defense(defense: Defense, experiment: Experiment) -> None:
    task, config = experiment.task, experiment.config
    sizes = [len(task.shards[c].x) for c in range(config.clients)]
    defense.check(task.plan)
    defense.check_data(task.plan, sizes)
    check_clients(defense, task.plan, config, min(sizes))
    check_answers("defenses", defense.name, lambda: answer_faults(defense, task.plan, sizes, config.rounds))


def _check_victims(experiment: Experiment, group: CellGroup) -> None:
    task, config = experiment.task, experiment.config
    if group.records:
        choose_candidates(task.shards, task.test, config.candidates, task.seeds, group.threat)
        return
    group_victims(experiment, group)
    if config.tuning and any(len(attack.variants()) > 1 for attack in experiment.attacks):
        tuning_victims(experiment.points[group.point].defense, experiment, group)


def compute(
    planned: Sequence[PlannedCells],
    todo: Sequence[PlannedCells],
    store: Store,
    executor: Executor,
    progress: Bars,
    *,
    strict: bool,
    first: Sequence[str] = (),
    command: str = "",
) -> bool:
    """Train what the cells `todo` need, and run them; return whether any, or the self-test, was missing.

    first: names of the cells of the first answer; they run first and are reported as soon as they have ended.
    Warns where finished cells among `planned` were computed by other code. Reports how the data were read, and which
    attacks are left out.
    """
    experiments = dict.fromkeys(one.experiment for one in planned)
    notes = tuple(dict.fromkeys(note for experiment in experiments for note in experiment.notes))
    for note in dict.fromkeys([*notes, *(line for experiment in experiments for line in inapplicable(experiment))]):
        progress.say(note)
    warn_changed(store.out, reused=count_cells(todo) < count_cells(planned), computing=bool(todo))
    if not todo and soundness_of(store) is not None:
        return False
    save_origin(store.out, command, notes)
    if not todo:
        save_soundness(store.out, selftest())
        return True
    work = Scheduler(store, executor, progress, strict, first)
    work.run(strands(todo, store.out, first), meanwhile=lambda: save_soundness(store.out, selftest()))
    shutil.rmtree(drafts_of(store.out).out, ignore_errors=True)
    return True
