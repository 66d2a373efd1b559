"""Train one point of an evaluation, or load it: a finished training is never repeated."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from ppbench.base.errors import UsageError
from ppbench.base.fence import check_answers
from ppbench.base.files import kind_of, listing, publish_folder
from ppbench.base.seeds import Seeds
from ppbench.base.tensor_files import seal, unsealed
from ppbench.base.tree import Params
from ppbench.base.version import __version__
from ppbench.base.vocabulary import PADDING
from ppbench.federation.contract import guarantee_faults
from ppbench.federation.engine import Federation, ProbeKind, probe_plan
from ppbench.federation.plan import Plan
from ppbench.metrics.intervals import Estimate, Interval, bootstrap, clopper_pearson
from ppbench.nets.net import LOGITS_AT_ONCE, initial
from ppbench.records.run_files import save_time, training_id
from ppbench.records.schema import TRAININGS, Cost, Played, Privacy, Strict, Utility
from ppbench.report.controls import CONTROLS
from ppbench.run.cost import client_cost
from ppbench.run.experiment import Experiment, Point
from ppbench.run.task import Task

# -- Trainings that collapsed: accuracy at chance in every evaluated round. They are retried, and records say so --
# This detects a model that always gives one answer. Weights that jump about at random can be right more often than
# chance in one round, as Adam's at a rate of 1e6 on digits in two of four seeds: as a first training these are not
# detected, but none replaces one that collapsed unless it ends above chance.

MIN_EVALUATIONS = 3
"""Fewest evaluated rounds for a decision: at chance in fewer, a training may only have begun."""


def constant_answer(task: Task) -> tuple[int, int]:
    """Return how many answers on the test part are right if all are the most frequent class, or next token; of all."""
    y = task.test.y
    answers = next_tokens(y)[0] if task.predicts_tokens else y.argmax(1)
    return int(answers.bincount().max()), len(answers)


def at_chance(utility: Utility, task: Task) -> bool:
    """Return whether accuracy never rose above chance: in no evaluated round, of `MIN_EVALUATIONS` or more.

    Chance is the share of the most frequent class, or next token, of the test part, and the upper end of its 95 %
    Clopper-Pearson interval still counts as chance. Numbers and masks have no such level, and a training that diverged
    its own status.
    """
    if task.segmented or utility.accuracy is None or len(utility.curve) < MIN_EVALUATIONS:
        return False
    return all(accuracy <= chance_ceiling(task) for _, accuracy in utility.curve)


def ends_above_chance(utility: Utility, task: Task) -> bool:
    """Return whether the delivered model is above chance, as a training that replaces a collapsed one must be."""
    return utility.accuracy is not None and utility.accuracy > chance_ceiling(task)


def chance_ceiling(task: Task) -> float:
    """Return the largest accuracy that still counts as chance, see `at_chance`."""
    return clopper_pearson(*constant_answer(task)).high or 0.0


def task_of_attempt(task: Task, attempt: int) -> Task:
    """Return the task with the seeds and the initial model of a training: 0 is the cell's own, others derive from it.

    Examples, their owners and victims stay the same.
    """
    if attempt == 0:
        return task
    seeds = Seeds(task.seeds.seed("training", attempt), task.seeds.salt)
    return replace(task, seeds=seeds, params=initial(task.plan.spec, seeds.seed("model")))


def attempt_number(utility: Utility) -> int:
    """Return the index of the training that a utility describes: the first that did not collapse, 0 if all did."""
    return 0 if utility.collapsed >= TRAININGS else utility.collapsed


TRAINED_FILE = "trained.json"
"""File of a training's figures, with their digest and those of the states beside them."""
TOP5_CLASSES = 10
"""Most classes for which Top-5 accuracy is not kept: with ten, five guesses are half of all."""
MASK_PIXELS_AT_ONCE = 2**20
"""Pixels that are predicted at a time in segmentation: such networks keep maps of full size."""


class TrainingResult(Strict):
    """The figures of a training, without its states. seconds: wall time, never part of a record."""

    utility: Utility
    cost: Cost
    privacy: Privacy
    played: Played | None
    diverged: bool
    seconds: float


CHECKPOINT_S = 300.0
"""Seconds of training, or more, between two checkpoints: so much is lost at most when a process is killed."""


class Progress(Strict):
    """Figures of a training on its way. curve: of the rounds so far; seconds: of their wall time."""

    curve: list[tuple[int, float]]
    memory_peak: int | None
    seconds: float


class Checkpoints:
    """Checkpoints of a long training, folders beside `home` named by attempt and round; none when it has ended.

    The one that a training was resumed from stays until then, as states of sampled clients are read when needed.
    """

    def __init__(self, home: Path, attempt: int) -> None:
        self._home, self._stem = home, f"{home.name}.{attempt}.round"
        self._last: Path | None = None
        self._next = CHECKPOINT_S

    def resume(self, fed: Federation, params: Params) -> Progress | None:
        """Restore the latest round whose checkpoint is intact; None: there is no such, and `fed` is as it was."""
        for folder in self._folders():
            try:
                progress = Progress.model_validate_json(json.dumps(unsealed(folder / TRAINED_FILE)))
                fed.restore(folder, params)
            except (UsageError, ValueError, OSError) as damage:
                words = "training goes on from an earlier one, or begins again"
                warnings.warn(f"The checkpoint {folder} cannot be used ({damage}); {words}.", stacklevel=2)
                continue
            fed.seconds, self._next = progress.seconds, progress.seconds + CHECKPOINT_S
            return progress
        return None

    def save(self, fed: Federation, curve: list[tuple[int, float]], memory_peak: int | None) -> None:
        """Keep a round if `CHECKPOINT_S` have passed since the last one; Unwritable: it cannot be written."""
        if fed.seconds < self._next:
            return

        def write(draft: Path) -> None:
            fed.save(draft)
            progress = Progress(curve=curve, memory_peak=memory_peak, seconds=fed.seconds)
            seal(draft, TRAINED_FILE, progress.model_dump(mode="json"))

        folder = self._home.with_name(f"{self._stem}{fed.round}")
        publish_folder(folder, write)
        if self._last is not None:
            shutil.rmtree(self._last, ignore_errors=True)
        self._last, self._next = folder, fed.seconds + CHECKPOINT_S

    def clear(self) -> None:
        """Remove all checkpoints of this training."""
        for folder in self._folders():
            shutil.rmtree(folder, ignore_errors=True)

    def _folders(self) -> list[Path]:
        """Return the checkpoints, the latest round first."""
        parent = self._home.parent
        known = [path for path in listing(parent) if path.name.startswith(self._stem)] if parent.is_dir() else []
        rounds = {path: path.name.removeprefix(self._stem) for path in known}
        return sorted((path for path in known if rounds[path].isdecimal()), key=lambda path: -int(rounds[path]))


def federation(experiment: Experiment, point: Point, attempt: int = 0) -> Federation:
    """Return a federation of the experiment's task under the point's defense, not yet started, for one training."""
    task, config = task_of_attempt(experiment.task, attempt), experiment.config
    return Federation(point.defense, task.plan, task.shards, task.seeds, torch.device(config.device), config.backend)


def home_of(experiment: Experiment, point: Point, cache: Path) -> Path:
    """Return the folder of a training under `cache`: its name is the hash of everything that determines it."""
    info = point.info
    about = info.id, info.edition, info.parameters
    return cache / training_id(__version__, about, experiment.facts, experiment.config.seed)


def untrained(classes: int, count: int, reason: str) -> TrainingResult:
    """Return the figures of a training that was not run, on `count` test examples: null, with the reason."""
    none = Utility(accuracy=None, low=None, high=None, n=count, chance=1 / classes, curve=[], reason=reason)
    cost, privacy = Cost(bytes_up=0, bytes_down=0, bytes_setup=0), Privacy(epsilon=None, delta=None, reason=reason)
    return TrainingResult(utility=none, cost=cost, privacy=privacy, played=None, diverged=False, seconds=0.0)


def is_trained(home: Path) -> bool:
    """Return whether a training's folder holds it finished."""
    return kind_of(home / TRAINED_FILE, follow=False) == "file"


def load_trained(home: Path) -> TrainingResult:
    """Return the figures in a training's folder; UsageError: they or a state beside them are damaged."""
    try:
        return TrainingResult.model_validate_json(json.dumps(unsealed(home / TRAINED_FILE)))
    except ValueError as cause:
        raise UsageError(f"{home / TRAINED_FILE} holds other fields than this ppbench's") from cause


def kept_training(experiment: Experiment, point: Point, cache: Path) -> tuple[Federation, TrainingResult]:
    """Return a finished training from `cache`, as the federation and its figures; nothing is trained.

    UsageError, ValueError, OSError: it is damaged.
    """
    home = home_of(experiment, point, cache)
    kept = load_trained(home)
    attempt = attempt_number(kept.utility)
    fed = federation(experiment, point, attempt)
    fed.restore(home, task_of_attempt(experiment.task, attempt).params)
    return fed, kept


def train(
    experiment: Experiment, point: Point, cache: Path, after: Callable[[int], None] | None = None
) -> tuple[Federation, TrainingResult]:
    """Return the trained federation and its figures, from `cache` if they are there; `after` is called with each round.

    A checkpoint appears whole or not at all. A training that collapsed is repeated with other seeds, except for
    controls; if all collapse, the first counts.
    """
    home, retried = home_of(experiment, point, cache), point.defense.name not in CONTROLS
    if is_trained(home):
        try:
            fed, kept = kept_training(experiment, point, cache)
            if kept.utility.collapsed or not (retried and at_chance(kept.utility, experiment.task)):
                return fed, kept
        except (UsageError, ValueError, OSError) as damage:
            warnings.warn(f"The cached training {home} cannot be used ({damage}); it is done again.", stacklevel=2)
    fed, result = first = _train_once(experiment, point, 0, cache, after)
    if retried and at_chance(result.utility, experiment.task):
        fed, result = _retrain(experiment, point, cache, first)

    def write(draft: Path) -> None:
        fed.save(draft)
        seal(draft, TRAINED_FILE, result.model_dump(mode="json"))

    publish_folder(home, write)
    return fed, result


def _retrain(
    experiment: Experiment, point: Point, cache: Path, first: tuple[Federation, TrainingResult]
) -> tuple[Federation, TrainingResult]:
    """Train with other seeds until one learns and return that one, else `first`; its figures count the collapses."""
    for attempt in range(1, TRAININGS):
        fed, result = _train_once(experiment, point, attempt, cache, None)
        if not result.diverged and ends_above_chance(result.utility, experiment.task):
            update = {"collapsed": attempt, "retrained": fed.seeds.master}
            return fed, result.model_copy(update={"utility": result.utility.model_copy(update=update)})
    fed, result = first
    return fed, result.model_copy(update={"utility": result.utility.model_copy(update={"collapsed": TRAININGS})})


def _train_once(
    experiment: Experiment, point: Point, attempt: int, cache: Path, after: Callable[[int], None] | None
) -> tuple[Federation, TrainingResult]:
    """Train once, from the last checkpoint if there is one, which a killed process left.

    A client's cost is measured before the first round; its time is kept for the first training.
    """
    task, rounds = task_of_attempt(experiment.task, attempt), experiment.config.rounds
    fed, home = federation(experiment, point, attempt), home_of(experiment, point, cache)
    checkpoints = Checkpoints(home, attempt)
    progress = checkpoints.resume(fed, task.params)
    if progress is None:
        fed.start(task.params)
        taken = client_cost(fed, task.params)
        if taken.time is not None and attempt == 0:
            save_time(cache.parent, home.name, taken.time)
        progress = Progress(curve=[], memory_peak=taken.memory_peak, seconds=0.0)
    curve, measured = progress.curve, measured_rounds(rounds)

    def watch(round_: int) -> None:
        if round_ in measured:
            figure = curve_figure(fed, task)
            if math.isfinite(figure):
                curve.append((round_, figure))
        if round_ < rounds:
            checkpoints.save(fed, curve, progress.memory_peak)
        if after is not None:
            after(round_)

    finished = fed.run(rounds, watch)
    checkpoints.clear()
    return fed, figures_of(fed, task, curve, finished, progress.memory_peak)


def measured_rounds(last: int) -> list[int]:
    """Return the rounds after which a training up to round `last` is measured: ten or so, the last among them."""
    step = max(1, last // 10)
    return sorted({*range(step, last + 1, step), last})


SquaredError = tuple[float, float | None, float | None]
"""Mean squared error and the ends of its interval."""


def mean_square(fed: Federation, task: Task) -> SquaredError:
    """Return the mean squared error on the test part over `Federation.models`, and its interval (None for one
    example)."""
    every = [(outputs - task.test.y.double()).square().mean(1) for outputs in fed.answers(task.test.x)]
    errors = torch.stack(every).mean(0)
    mean, spread = float(errors.mean()), math.nan if len(errors) < 2 else float(errors.std()) / len(errors) ** 0.5
    if not math.isfinite(spread):
        return mean, None, None
    return mean, max(0.0, mean - 1.96 * spread), mean + 1.96 * spread


def _top5(fed: Federation, task: Task) -> tuple[float, Interval]:
    """Return the share of the test part whose class is among the five likeliest, the mean over `Federation.models`."""
    truth, n = task.test.y.argmax(1, keepdim=True), len(task.test.x)
    right = [(outputs.topk(5).indices == truth).any(1) for outputs in fed.answers(task.test.x)]
    share = float(torch.stack(right).double().mean())
    return share, clopper_pearson(round(share * n), n)


def curve_figure(fed: Federation, task: Task) -> float:
    """Return the figure of the learning curve: accuracy, of pixels or of next tokens where these are targets, or mean
    squared error."""
    if task.segmented:
        return float(masks_overlap(fed, task).accuracy.mean())
    if task.predicts_tokens:
        return float(torch.cat(tokens_right(fed, task)).mean())
    return fed.accuracy(task.test) if task.classified else mean_square(fed, task)[0]


def figures_of(
    fed: Federation, task: Task, curve: list[tuple[int, float]], finished: bool, memory_peak: int | None
) -> TrainingResult:
    """Return accuracy, bytes and guarantee of a training that has ended."""
    failure = None if finished else f"the model was not finite after round {fed.round}"
    squared = None
    if finished:
        check_answers("defenses", fed.defense.name, lambda: _output_faults(fed.outputs(task.test.x[:2]), task))
        squared = mean_square(fed, task) if task.plan.loss == "squared" else None
    if squared is not None and not math.isfinite(squared[0]):  # large weights of many layers multiply
        failure = f"the model's errors were not finite after round {fed.round}"
    return TrainingResult(
        utility=_utility(fed, task, curve, squared) if failure is None else _no_utility(task, curve, failure),
        cost=_cost(fed, memory_peak),
        privacy=_privacy(fed),
        played=_played(fed),
        diverged=failure is not None,
        seconds=fed.seconds,
    )


def _no_utility(task: Task, curve: list[tuple[int, float]], reason: str) -> Utility:
    """Return the utility of a model that gives no finite outputs: none, with the reason."""
    classes, count = task.plan.spec.classes, len(task.test.x)
    return Utility(accuracy=None, low=None, high=None, n=count, chance=1 / classes, curve=curve, reason=reason)


def _utility(fed: Federation, task: Task, curve: list[tuple[int, float]], squared: SquaredError | None) -> Utility:
    """Return the figures of a model that gives finite outputs; `squared`: its error where that is the loss."""
    if task.segmented:
        return _mask_utility(fed, task, curve)
    if task.predicts_tokens:
        return _token_utility(fed, task, curve)
    n, classes, truth = len(task.test.x), task.plan.spec.classes, task.test.y
    accuracy = curve[-1][1] if task.classified else None
    interval = None if accuracy is None else clopper_pearson(round(accuracy * n), n)
    top5, ends = _top5(fed, task) if accuracy is not None and classes > TOP5_CLASSES else (None, None)
    mse, mse_low, mse_high = squared or (None, None, None)
    return Utility(
        accuracy=accuracy,
        low=interval.low if interval else None,
        high=interval.high if interval else None,
        n=n,
        chance=1 / classes,
        curve=curve,
        reason=None if interval else "targets are numbers; mse stands instead",
        mse=mse,
        mse_low=mse_low,
        mse_high=mse_high,
        accuracy_top5=top5,
        accuracy_top5_low=ends.low if ends else None,
        accuracy_top5_high=ends.high if ends else None,
        constant=None if accuracy is None else constant_answer(task)[0] / n,
        constant_mse=None if mse is None else float((truth.double() - truth.double().mean(0)).square().mean()),
    )


def _output_faults(outputs: Tensor, task: Task) -> Iterator[str]:
    """Yield what is wrong with the outputs of `predict` on the first two test examples."""
    each = (*task.plan.spec.shape, task.plan.spec.classes) if task.predicts_tokens else (task.plan.spec.classes,)
    if outputs.shape[: 1 + len(each)] != (len(task.test.x[:2]), *each):
        right = ", ".join(["examples", *map(str, each)])
        yield f"answers a tensor of shape {tuple(outputs.shape)} to predict(...); it must be [{right}]"
    elif not outputs.isfinite().all():
        yield "answers to predict(...) with numbers that are not finite, though its weights are"


def _cost(fed: Federation, memory_peak: int | None) -> Cost:
    per = (fed.plan.sample or fed.plan.clients) * max(1, fed.round)
    return Cost(
        bytes_up=(fed.wire.up - fed.setup_up) / per,
        bytes_down=(fed.wire.down - fed.setup_down) / per,
        bytes_setup=fed.setup_up + fed.setup_down,
        memory_peak=memory_peak,
    )


def _privacy(fed: Federation) -> Privacy:
    guarantee = _guarantee(fed, lambda size: fed.plan, fed.round)
    return Privacy(
        epsilon=guarantee[0] if guarantee else None,
        delta=guarantee[1] if guarantee else None,
        reason=None if guarantee else fed.defense.why_no_epsilon(fed.plan, fed.parties.server, fed.round),
    )


def _guarantee(fed: Federation, plan_of: Callable[[int], Plan], rounds: int) -> tuple[float, float] | None:
    """Return the weakest client's (epsilon, delta), None if a client has none; plan_of: the plan for a number of
    examples."""
    sizes = sorted({len(shard.x) for shard in fed.shards.values()})
    answers = [fed.defense.guarantee(plan_of(size), size, rounds) for size in sizes]
    check_answers("defenses", fed.defense.name, lambda: chain.from_iterable(map(guarantee_faults, answers)))
    guarantees = [answer for answer in answers if answer is not None]
    return max(guarantees) if len(guarantees) == len(sizes) else None


def with_probe_guarantee(privacy: Privacy, fed: Federation, kind: ProbeKind, rounds: int) -> Privacy:
    """Return `privacy` with the guarantee of a probed client's upload.

    Its example takes part for certain, so sampling gains nothing: all of the client's examples are in one batch.
    """
    if privacy.epsilon is None:
        return privacy
    guarantee = _guarantee(fed, lambda size: probe_plan(fed.plan, fed.defense, size, kind, rounds, whole=True), rounds)
    epsilon, delta = guarantee or (None, None)
    return privacy.model_copy(update={"probe_epsilon": epsilon, "probe_delta": delta})


def _played(fed: Federation) -> Played | None:
    rounds = fed.defense.played(fed.plan, fed.parties.server)
    if rounds is None:
        return None
    examples = [len(fed.shards[client].x) for client in range(fed.plan.clients)]
    return Played(roles=list(fed.defense.roles), rounds=rounds.tolist(), examples=examples)


# -- Segmentation: Dice coefficient and pixel accuracy of predicted masks --


@dataclass(frozen=True)
class Overlap:
    """Figures of N images, float64 [N] each: dice = 2 |A and B| / (|A| + |B|) of predicted and true ones (Dice 1945), 1
    if neither mask has any, and accuracy, the share of pixels with the right prediction.
    """

    dice: Tensor
    accuracy: Tensor


def mask_overlap(logits: Tensor, masks: Tensor) -> Overlap:
    """Return the figures of masks predicted by positive, finite `logits` for 0/1 `masks`.

    Both are [N, 1, H, W]; ValueError if the shapes differ.
    """
    if logits.shape != masks.shape:
        raise ValueError(f"logits of shape {tuple(logits.shape)} for masks of {tuple(masks.shape)}")
    predicted, true = ((logits > 0) & logits.isfinite()).flatten(1), (masks > 0.5).flatten(1)
    both, total = (predicted & true).sum(1).double(), (predicted.sum(1) + true.sum(1)).double()
    return Overlap(torch.where(total > 0, 2 * both / total.clamp(min=1), 1.0), (predicted == true).double().mean(1))


def over_images(figures: Tensor, seed: int) -> Estimate:
    """Return the mean of `figures` [N] with its bootstrap interval over images."""
    return bootstrap([value.reshape(1).numpy() for value in figures], "mean", seed)


def masks_overlap(fed: Federation, task: Task) -> Overlap:
    """Return how well predicted masks fit those of the test part, image by image the mean over `Federation.models`."""
    size = max(1, MASK_PIXELS_AT_ONCE // task.test.y[0].numel())
    parts = [*zip(task.test.x.split(size), task.test.y.split(size), strict=True)]
    by_model = [[mask_overlap(fed.outputs(x, model), y) for x, y in parts] for model in fed.models()]
    dice = torch.stack([torch.cat([part.dice for part in model]) for model in by_model])
    accuracy = torch.stack([torch.cat([part.accuracy for part in model]) for model in by_model])
    return Overlap(dice.mean(0), accuracy.mean(0))


def _mask_utility(fed: Federation, task: Task, curve: list[tuple[int, float]]) -> Utility:
    """Return the figures of predicted masks; chance is the pixel accuracy of the best constant mask."""
    fit, ones = masks_overlap(fed, task), float(task.test.y.double().mean())
    accuracy, dice = (over_images(part, task.seeds.seed("utility")) for part in (fit.accuracy, fit.dice))
    return Utility(
        accuracy=accuracy.value,
        low=accuracy.interval.low,
        high=accuracy.interval.high,
        n=len(fit.dice),
        chance=max(ones, 1 - ones),
        curve=curve,
        reason="accuracy is the share of pixels; intervals resample images",
        dice=dice.value,
        dice_low=dice.interval.low,
        dice_high=dice.interval.high,
    )


# -- Next tokens of texts: the share that is predicted --


def next_tokens(texts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens but the first of texts [N, L], padding aside, int64 [T], and where they stand, [N, L - 1]."""
    tokens = texts[:, 1:].round().long()
    real = tokens != PADDING
    return tokens[real], real


def tokens_right(fed: Federation, task: Task) -> list[Tensor]:
    """Return for each test text the share of models whose likeliest next token is right, of each token but the first.

    float64, ragged; texts of one token have none.
    """
    size = max(1, LOGITS_AT_ONCE // (task.plan.spec.classes * task.plan.spec.shape[0]))
    parts, models = task.test.x.split(size), fed.models()
    right = [torch.cat([fed.outputs(x, one)[:, :-1].argmax(-1) == x[:, 1:] for x in parts]) for one in models]
    shares, (_, real) = torch.stack(right).double().mean(0), next_tokens(task.test.x)
    return [share[known] for share, known in zip(shares, real, strict=True) if known.any()]


def _token_utility(fed: Federation, task: Task, curve: list[tuple[int, float]]) -> Utility:
    """Return the share of next tokens that are predicted, beside that of the most frequent one.

    Its interval resamples texts: the tokens of one depend on one another.
    """
    shares, (commonest, count) = [share.numpy() for share in tokens_right(fed, task)], constant_answer(task)
    interval = bootstrap(shares, "mean", task.seeds.seed("utility")).interval
    return Utility(
        accuracy=curve[-1][1],
        low=interval.low,
        high=interval.high,
        n=len(task.test.x),
        chance=1 / task.plan.spec.classes,
        curve=curve,
        reason="accuracy is the share of next tokens; intervals resample texts",
        constant=commonest / count,
        tokens=count,
    )
