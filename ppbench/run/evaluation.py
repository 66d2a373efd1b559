"""The line that all data take, on one page: options are checked, missing cells computed, results reported.

`schedule` and `group` hold the middle of it (`train`, `Federation.probe`, `Transcript.view`, `Attack.run`, `score`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ppbench.adversary.victims import choose_candidates
from ppbench.base.bars import Bars
from ppbench.base.blame import guard, refuse, stranger
from ppbench.base.device import check_device
from ppbench.base.errors import UsageError, shown
from ppbench.base.precision import computing
from ppbench.federation.contract import Defense
from ppbench.federation.declared import answer_faults
from ppbench.metrics.perceptual import check_weights
from ppbench.records.origin import save_origin
from ppbench.records.salt import keep_salt, salt_of
from ppbench.records.schema import Record
from ppbench.records.soundness import save_soundness, soundness_of
from ppbench.records.sources import warn_changed
from ppbench.records.store import Store
from ppbench.records.times import time_of
from ppbench.report.controls import Check, check_harness
from ppbench.report.page.answer import Answer, answer_of
from ppbench.report.page.board import up_to_date, write_board
from ppbench.report.unasked import skipped_searches
from ppbench.report.verdict import verdicts
from ppbench.report.verdict.verdict import Verdict
from ppbench.run.audit.population import populate
from ppbench.run.cells import CellGroup, groups
from ppbench.run.config import EvaluateConfig, configure
from ppbench.run.executors import check_workers, default_workers, make_executor
from ppbench.run.experiment import Experiment, resolve
from ppbench.run.jobs import Executor
from ppbench.run.looks import in_first_answer
from ppbench.run.scene import group_victims
from ppbench.run.schedule import (
    PlannedCells,
    Progress,
    Scheduler,
    count_cells,
    ended_cells,
    plan_cells,
    strands,
    unfinished,
)
from ppbench.run.selftest import selftest
from ppbench.run.task import check_clients
from ppbench.run.tuning import tuning_victims
from ppbench.task.dataset import check_content


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation: its cells, the checks of the harness, the verdicts.

    answer: the summary, reported first; computed: number of cells that ran in this call; notes: how the data were read.
    """

    config: EvaluateConfig
    records: tuple[Record, ...]
    verdicts: tuple[Verdict, ...]
    answer: Answer
    out: Path
    computed: int
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> tuple[str, ...]:
        """The verdicts, in sentences."""
        return tuple(verdict.sentence for verdict in self.verdicts)

    @property
    def checks(self) -> tuple[Check, ...]:
        """The checks of the harness: both controls, and the self-test."""
        return self.answer.trust.checks

    @property
    def left_out(self) -> tuple[str, ...]:
        """The attacks that were skipped because the undefended model withstands them too, in sentences."""
        return tuple(one.sentence for one in skipped_searches(self.config.defense, self.records))

    @property
    def reliable(self) -> bool:
        """Whether something can be concluded: see `Trust.reliable`."""
        return self.answer.trust.reliable


@computing()
def evaluate(
    config: EvaluateConfig | None = None,
    *,
    out: Path | str = "ppbench-results",
    workers: int | None = None,
    progress: Progress | None = None,
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
    # Errors of other packages' code outside of jobs, as in cells' names or on the board, become one sentence.
    with guard():
        return _evaluate(config, Path(out), workers, progress, command, preset, options)


def _evaluate(
    config: EvaluateConfig | None,
    out: Path,
    workers: int | None,
    progress: Progress | None,
    command: str,
    preset: str,
    options: Mapping[str, Any],
) -> Evaluation:
    config = config if config is not None else configure(preset, **options)
    check_workers(workers)
    store, progress = Store(out), progress or Bars(quiet=True)
    if config.isolate and not config.salt:
        config = config.model_copy(update={"salt": salt_of(store.out)})
    experiment = resolve(config)
    check_experiment(experiment)
    store.prepare()
    keep_salt(store.out, config.salt)
    store.sweep()
    plan = plan_cells([experiment])
    todo = unfinished(plan, store)
    count = workers or default_workers(config.device)  # a single worker is this process
    executor = make_executor("inline" if count == 1 else "local", count, partial(progress.advance, "training"))
    first = [cell.id for one in plan if in_first_answer(experiment, one.group) for cell in one.cells]
    computed = compute(plan, todo, store, executor, progress, strict=True, first=first, command=command)
    records = tuple(store.load(cell) for cell in ended_cells(plan, store))
    answer = answer_of(records, check_harness(soundness_of(store)), partial(time_of, store.out))
    if computed or not up_to_date(store):
        write_board(store)
    computed_cells = len(ended_cells(todo, store))
    sentences = tuple(verdicts(config.defense, records))
    return Evaluation(config, records, sentences, answer, store.out, computed_cells, experiment.notes)


@guard()
def check_experiment(experiment: Experiment) -> None:
    """Refuse an experiment that cannot be run (UsageError), before anything is written."""
    config = experiment.config
    check_device(config.device)
    task = experiment.task
    check_weights(config.weights, task.plan.spec.shape)
    every = list(groups(experiment))
    if not every:
        raise UsageError(
            "There is nothing to evaluate: membership and extraction attacks need --stage final, and gradient attacks "
            "on a defense that perturbs the model need another --threat than client/1."
        )
    for point in experiment.points:
        with guard("defenses", point.defense.name):
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
        if not stranger("attacks", attack.name):  # others were checked when they were resolved
            attack.check_held(inputs)
    if any(group.stage == "audit" for group in every):
        populate(experiment)
    drawn: dict[Hashable, CellGroup] = {}
    for group in (g for g in every if g.stage != "audit"):  # victims are the same at every point and stage
        defense = experiment.points[group.point].defense
        drawn.setdefault((replace(group, point=0, stage="init"), defense.sums, len(defense.roles)), group)
    for group in drawn.values():
        _check_victims(experiment, group)


def _check_defense(defense: Defense, experiment: Experiment) -> None:
    task, config = experiment.task, experiment.config
    sizes = [len(task.shards[c].x) for c in range(config.clients)]
    defense.check(task.plan)
    defense.check_data(task.plan, sizes)
    check_clients(defense, task.plan, config, min(sizes))
    if stranger("defenses", defense.name):
        refuse("defenses", defense.name, answer_faults(defense, task.plan, sizes, config.rounds))


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
    progress: Progress,
    *,
    strict: bool,
    first: Sequence[str] = (),
    command: str = "",
) -> bool:
    """Train what the cells `todo` need, and run them; return whether any, or the self-test, was missing.

    first: names of the cells of the first answer; they run first and are reported as soon as they have ended.
    Warns where finished cells among `planned` were computed by other code. Reports how the data were read.
    """
    notes = tuple(dict.fromkeys(note for one in planned for note in one.experiment.notes))
    for note in notes:
        progress.say(note)
    warn_changed(store.out, reused=count_cells(todo) < count_cells(planned), computing=bool(todo))
    if not todo and soundness_of(store) is not None:
        return False
    save_origin(store.out, command, notes)
    if not todo:
        save_soundness(store.out, selftest())
        return True
    work = Scheduler(store, executor, progress, strict, first)
    work.run(strands(todo, store.out), meanwhile=lambda: save_soundness(store.out, selftest()))
    return True
