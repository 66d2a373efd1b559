"""Recompute for `ppbench verify`, with local data and plugins: victims, originals, guarantees, evidence, the page.

Of the networks that records name only small ones of ours are built, whoever wrote them; when data are dealt out, one
stands in. No attack is run and nothing is trained.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from math import isclose
from pathlib import Path
from typing import Any, cast

import torch

from ppbench.adversary.attack import Challenge, Guess
from ppbench.adversary.victims import Victims, choose_candidates, choose_victims
from ppbench.base.device import computing
from ppbench.base.errors import UsageError, first_of, one_line
from ppbench.base.registry import PluginGroup, find
from ppbench.base.version import __version__
from ppbench.claims.check import PAPER_CLAIMS, claimed
from ppbench.federation.contract import Defense
from ppbench.federation.engine import probe_plan
from ppbench.federation.plan import Data, Plan
from ppbench.federation.threats import THREATS, threat_model
from ppbench.federation.view import Transcript
from ppbench.metrics.modality import modality_of
from ppbench.metrics.text import share_in_text, tokens_of
from ppbench.questions.base import missing_sentences, question_for
from ppbench.questions.inquiry import Inquiry, Probe, Scored, TargetModel, Yardstick
from ppbench.records.run_files import commitment, salt_of, training_of
from ppbench.records.schema import CellConfig, Record
from ppbench.records.store import Pictures, Store
from ppbench.report.integrity import TRAINING_FIELDS, missing_controls, of_training
from ppbench.report.page.board import page_of
from ppbench.run.cells import Cell, CellGroup, find_cell, plan_of_cell, task_of_cell
from ppbench.run.experiment import Experiment, make_defense
from ppbench.run.scene import Scene, probe_group, yardstick_of
from ppbench.run.sweep import local_dataset, missing_cells
from ppbench.run.task import Task
from ppbench.run.train import (
    TrainingResult,
    curve_figure,
    federation,
    is_trained,
    kept_training,
    load_trained,
    measured_rounds,
)
from ppbench.verification import Findings, examine, not_checked

MAX_BUILT = 1_000_000
"""Most values of an input, and a thousand times the classes, of a network that is built to check a guarantee."""
EPSILON_TOLERANCE = 1e-6
"""Relative difference beyond which an epsilon is not the mechanism's: accountants optimize over orders."""
_OF_DATA, _OF_DEFENSE = "victims, originals, recognition and at_truth", "epsilon, victims and at_truth"


@dataclass
class _Notes:
    """Problems, and counts of what could not be checked, and why. salt: the secret of the folder, "" for none."""

    salt: str = ""
    problems: list[str] = field(default_factory=list)
    missed: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)

    def wrong(self, record: Record, clause: str) -> None:
        self.problems.append(f"{record.cell_id}.json: {clause}")

    def miss(self, what: str, why: str, name: str = "") -> None:
        """Count a cell of which `what` could not be checked; name: of what is to blame, "" for none."""
        self.missed.setdefault((what, why), Counter())[name] += 1

    def gaps(self, total: int) -> Iterator[str]:
        """Yield what could not be checked of `total` cells, a clause each."""
        for (what, why), names in self.missed.items():
            named = f": {first_of(sorted(names))}" if any(names) else ""
            yield not_checked(what, names.total(), total, why + named)


@computing()
def recheck(store: Store, records: Sequence[Record]) -> Findings:
    """Return the problems of sound records that local data sets and plugins show, and what could not be checked."""
    notes, again = _Notes(salt_of(store.out, fresh=False)), list[Record]()
    for record in records:
        task = _task_of(record.config, notes)
        defense = _defense_of(record, notes)
        if defense is not None:
            _guarantee(record, defense, task, notes)
        if defense is not None and task is not None and record.victims:
            _victims(store, record, defense, task, notes)
            again.append(record)
    _trainings(store, records, notes)
    _evidence(store, again, notes)
    cells = [*missing_cells(records)]
    problems = *notes.problems, *(sentence for sentence, problem in cells if problem), *missing_controls(records)
    unchecked = *notes.gaps(len(records)), *(sentence for sentence, problem in cells if not problem)
    return Findings(problems, unchecked)


def full_findings(out: Path, page: bool = True) -> Findings:
    """Return what `examine` finds with everything that can be checked here: claims, data, plugins, cache, the page.

    page: whether it is checked; archives do not hold it.
    """
    return examine(out, claimed, _recheck_with_page if page else recheck)


def _recheck_with_page(store: Store, records: Sequence[Record]) -> Findings:
    one, two = recheck(store, records), _page(store, records)
    return Findings(one.problems + two.problems, one.unchecked + two.unchecked, one.checked + two.checked)


# -- what is at hand ---------------------------------------------------------------------------------------------------
def _task_of(config: CellConfig, notes: _Notes) -> Task | None:
    """Return the task of a record, None if its data are not available."""
    about = config.federation, config.data
    salt = notes.salt if config.data.salt else ""
    if commitment(salt) != config.data.salt:
        notes.miss(_OF_DATA, "drawn with a secret: OUT/salt is not here")
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
            notes.miss(_OF_DATA, "not at hand", config.data.name)


def _defense_of(record: Record, notes: _Notes) -> Defense | None:
    about = record.config.defense
    try:
        defense = make_defense(about.id, about.parameters)
    except UsageError:
        notes.miss(_OF_DEFENSE, "not installed here, or not with such parameters", about.id)
        return None
    if defense.version == about.version and type(defense).__module__.startswith("ppbench."):
        return defense
    notes.miss(_OF_DEFENSE, "another package's, or another version", about.id)
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
                notes.miss("epsilon", "it depends on the network, which is not built here")
                return
            plan = plan_of_cell(config, config.model.id)
        whole = _weakest(defense, lambda size: plan, sizes, fed.rounds)
        kind, rounds = config.probe, config.probe_rounds
        one = _weakest(defense, lambda size: probe_plan(plan, defense, size, kind, rounds, whole=True), sizes, rounds)
    except Exception as cause:  # noqa: BLE001 - parameters of a record may be anything
        notes.wrong(record, f"its mechanism's guarantee cannot be computed ({type(cause).__name__}: {cause})")
        return
    if whole is not None and task is None and whole != (0.0, 0.0):
        notes.miss("epsilon", "it depends on the sizes of shards")
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
    if not all(_agree(*pair, EPSILON_TOLERANCE) for pair in pairs):
        words = "none" if guarantee is None else f"({guarantee[0]:.6g}, {guarantee[1]:.6g})"
        notes.wrong(record, f"{what} is ({stated[0]}, {stated[1]}), its mechanism's guarantee {words}")


def _agree(stated: float | None, computed: float | None, relative: float, absolute: float = 0.0) -> bool:
    if stated is None or computed is None:
        return stated is computed
    return isclose(stated, computed, rel_tol=relative, abs_tol=absolute)


@lru_cache(maxsize=256)
def _epsilon(defense: Defense, plan: Plan, examples: int, rounds: int) -> tuple[float, float] | None:
    return defense.guarantee(plan, examples, rounds)


def _small(config: CellConfig) -> bool:
    """Return whether a record's network may be built: one of ours, of moderate size."""
    about, words = config.model, config.model.options.get("vocabulary", 0)
    ours = _is_ours("models", about.id) and about.options.keys() <= {
        "vocabulary",
        "every_token",
    }  # data and loss state them
    small = math.prod(about.shape) <= MAX_BUILT and about.classes <= MAX_BUILT // 1000
    return ours and small and isinstance(words, int) and words <= MAX_BUILT // 100


def _is_ours(group: PluginGroup, name: str) -> bool:
    plugin = find(group, name)
    return plugin is not None and plugin.ours


# -- victims -----------------------------------------------------------------------------------------------------------
def _victims(store: Store, record: Record, defense: Defense, task: Task, notes: _Notes) -> None:
    config, question = record.config, question_for(record)
    if config.audit is not None or (config.role and record.victims[0].slot is None):
        notes.miss("which candidates or victims were asked about", "audits and roles draw them otherwise")
        return
    try:
        victims = _draw_victims(record, defense, task) if question.source == "probe" else None
        inquiry = _inquiry(record, defense, task, victims)
        expected = [(score.place, score.truth) for score in inquiry.score(_empty_guesses(inquiry, config)).victims]
    except Exception as cause:  # noqa: BLE001 - another package's question may raise anything
        notes.miss("victims", type(cause).__name__, question.name)
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
        classes = config.model.classes
        model = TargetModel(task.test, config.victims, lambda x: torch.zeros(len(x), classes).double(), draw)
        return question.of_model(model)
    view = Transcript(task.plan, defense, (), ()).view(config.threat_model.id, own=victims.own)
    nobody = cast(Any, None)  # no attack is run
    return question.of_probe(Probe(nobody, view, victims, task.seeds, task.test))


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
    drawn = isinstance(images, Pictures)
    expected, rounding = (truth.x[: len(own)], 0.5 / 255 + EPSILON_TOLERANCE) if drawn else (truth.x, 0.0)
    if own.shape != expected.shape or not torch.allclose(own, expected, rtol=0, atol=rounding):
        notes.wrong(record, f"the originals beside its scores are not the victims' images in {record.config.data.name}")
        return
    seen = task.test if task.public is None else task.public
    modality = modality_of(record.config)
    mean, tokens = modality.blind_guess(seen.x), modality.blind_tokens(seen.x)
    nearly = EPSILON_TOLERANCE + rounding
    if images.blind is not None and not torch.allclose(torch.from_numpy(images.blind[0]), mean, atol=nearly):
        notes.wrong(record, "its blind guess is not the mean of the examples that all may see")
    _check_blind_tokens(record, truth.x, tokens, notes)
    gallery, scores = task.gallery(), image_scores(record)
    if drawn or gallery is None or any(score.recognition is None for score in scores):
        return
    for score, fresh in zip(scores, recognized(scores, guess, own, truth.y, gallery), strict=True):
        stated, computed = score.recognition, fresh.recognition
        if stated is not None and computed is not None and _seen(stated) != _seen(computed):
            notes.wrong(
                record, f"recognition of victim {score.place} is {_seen(stated)}, its image gives {_seen(computed)}"
            )
            return
    if record.config.perceptual:
        notes.miss("lpips, feat_mse and recognition by features", "they need the weights")


def _check_blind_tokens(record: Record, truth: torch.Tensor, tokens: Sequence[int], notes: _Notes) -> None:
    """Note a text whose blind guess in any order is not that of `tokens`; truth: [N, L], the victims' texts."""
    from ppbench.questions.reconstruction import image_scores

    for score, text in zip(image_scores(record), truth, strict=True):
        stated = None if score.text is None else score.text.blind_in_set
        if stated is not None and abs(stated - share_in_text(tokens, tokens_of(text))) > EPSILON_TOLERANCE:
            notes.wrong(record, "its blind guess in any order is not that of the texts that all may see")
            return


def _seen(recognition: Any) -> tuple[object, ...]:
    return recognition.gallery, recognition.rank, recognition.read, recognition.common


# -- trainings ---------------------------------------------------------------------------------------------------------
def _trainings(store: Store, records: Sequence[Record], notes: _Notes) -> None:
    """Compare trainings with the cache, as far as it still holds them whole, and their accuracy with its models'."""
    trainings = dict[str, list[Record]]()
    for record in records:
        rounds, last = [number for number, _ in record.utility.curve], record.config.federation.rounds
        expected = measured_rounds(last) if record.config.audit is None else [last]
        if record.utility.accuracy is not None and rounds != expected:
            notes.wrong(record, f"utility.curve is at rounds {rounds}; a training of {last} is measured at others")
        if record.config.audit is None and record.status != "failed":
            trainings.setdefault(training_of(record), []).append(record)
    for name, some in trainings.items():
        if is_trained(store.out / "cache" / name):
            _cached(store, name, some, notes)


def _cached(store: Store, name: str, records: Sequence[Record], notes: _Notes) -> None:
    """Compare the cells of a training with what the cache says that it gave."""
    try:
        kept = load_trained(store.out / "cache" / name)
    except UsageError:
        for _ in records:
            notes.miss("what a training gave", "its states in the cache are damaged or without digests")
        return
    for record in records:
        for part in TRAINING_FIELDS:
            if of_training(kept, part) != of_training(record, part):
                notes.wrong(record, f"{part} is not what the training in cache/{name} gave")
    _delivered(store, records, kept, notes)


def _delivered(store: Store, records: Sequence[Record], kept: TrainingResult, notes: _Notes) -> None:
    """Measure a kept model again, if it is one of our small ones under a defense of ours."""
    record = next((one for one in records if not _not_ours(one)), None)
    if record is None or kept.diverged or not kept.utility.curve:
        return
    try:
        experiment, group, _ = _cell_of(record, notes)
        fed, _ = kept_training(experiment, experiment.points[group.point], store.out / "cache")
        measured, (_, stated) = curve_figure(fed, experiment.task), kept.utility.curve[-1]
    except Exception:  # noqa: BLE001 - parameters of a record may be anything; its accuracy counts as not checked
        return
    if not isclose(measured, stated, rel_tol=MODEL_TOLERANCE, abs_tol=2 / max(1, kept.utility.n)):
        notes.wrong(record, f"its training's curve ends at {stated}, the model in cache/ measured again at {measured}")


# -- evidence: what the true inputs say of uploads that are made again -------------------------------------------------
EVIDENCE_TOLERANCE = 0.01
"""Relative difference beyond which a discrepancy at the truth is another upload's; sums are rounded otherwise."""
MODEL_TOLERANCE = 1e-3
"""Relative difference beyond which a kept model's figure is another one's; of shares two examples are allowed too."""
MOST_PROBED = 4096
"""Most inputs of a cell whose uploads are made again."""
OF_EVIDENCE = ("zero_gradient", "own_account", "own_weights")
"""Flags that follow from the evidence alone."""
_EXPLAINED = f"at_truth, ratio and the flags {', '.join(OF_EVIDENCE)}"


def _evidence(store: Store, records: Sequence[Record], notes: _Notes) -> None:
    """Make the uploads of probes again, and compare what the truth explains of them with the scores."""
    scenes = dict[str, list[Record]]()
    for record in records:
        if not question_for(record).inputs:
            continue
        if why := _not_again(store, record):
            notes.miss(_EXPLAINED, why)
        else:
            about = record.config.model_dump(mode="json", exclude={"attack", "threat_model", "tuning", "perceptual"})
            where = record.config.threat_model.id, about
            scenes.setdefault(json.dumps(where, sort_keys=True), []).append(record)
    for some in scenes.values():
        _explain(store, some, notes)


def _not_again(store: Store, record: Record) -> str:
    """Return why the uploads of a record's probe are not made again, "" if they are."""
    config, fed = record.config, record.config.federation
    threat = THREATS.get(config.threat_model.id)
    if config.audit is not None or threat is None or threat.acts:
        return "of audits, servers that act, and threat models that are not ours"
    if why := _not_ours(record):
        return why
    if (config.probe, fed.device, record.environment.ppbench) != ("gradient", "cpu", __version__):
        return "local training, a GPU, or another version"
    if max(len(record.victims), fed.clients, config.probe_rounds**3) > MOST_PROBED:
        return "too many inputs, clients or rounds"
    trained = config.stage == "init" or is_trained(store.out / "cache" / training_of(record))
    return "" if trained else "trained weights are not here"


def _not_ours(record: Record) -> str:
    """Return why a record's federation and attack are not made again, "" where they are ours and small."""
    config = record.config
    if config.attack.code or not _is_ours("attacks", config.attack.id) or not _is_ours("defenses", config.defense.id):
        return "of other packages' plugins"
    return "" if _small(config) else "the network is not built here"


def _explain(store: Store, records: Sequence[Record], notes: _Notes) -> None:
    """Compare the records of one scene with its uploads, which are made once."""
    made: tuple[Experiment, Scene, Yardstick] | None = None
    for record in records:
        try:
            experiment, group, cell = _cell_of(record, notes)
            made = made or (experiment, _scene(store, experiment, group), Yardstick(yardstick_of(experiment).mean))
            _explain_one(record, cell, *made, notes)
        except Exception as cause:  # noqa: BLE001 - parameters of a record may be anything
            notes.miss(_EXPLAINED, "they cannot be made again here", type(cause).__name__)


def _scene(store: Store, experiment: Experiment, group: CellGroup) -> Scene:
    """Return a group's probe, made again on initial weights or on those in the cache."""
    point = experiment.points[group.point]
    if group.stage != "init":
        return probe_group(experiment, group, kept_training(experiment, point, store.out / "cache")[0])
    fed = federation(experiment, point)
    fed.start(experiment.task.params)
    return probe_group(experiment, group, fed)


def _explain_one(
    record: Record, cell: Cell, experiment: Experiment, scene: Scene, ruler: Yardstick, notes: _Notes
) -> None:
    attack = cell.attack if record.tuned is None else cell.attack.variants()[record.tuned.chosen]
    task = experiment.task
    probe = Probe(attack, scene.view, scene.victims, task.seeds, task.test, lambda: ruler)
    inquiry = question_for(record).of_probe(probe)
    _compare_evidence(record, inquiry.score([Guess() for _ in inquiry.challenges]), notes)


def _cell_of(record: Record, notes: _Notes) -> tuple[Experiment, CellGroup, Cell]:
    """Return a record's cell, made again without the weights that measure images, on which no upload depends."""
    config = record.config.model_copy(update={"perceptual": ""})
    return find_cell(config, local_dataset(config.data.name) or "", notes.salt if config.data.salt else "")


def _compare_evidence(record: Record, scored: Scored, notes: _Notes) -> None:
    from ppbench.questions.reconstruction import image_scores

    made = {score.place: score for score in scored.victims}
    for score in image_scores(record):
        for name in ("at_truth", "ratio"):
            stated, computed = getattr(score, name), getattr(made[score.place], name)
            if not _agree(stated, computed, EVIDENCE_TOLERANCE, EPSILON_TOLERANCE):
                victim = f"{name} of victim {score.place}"
                notes.wrong(record, f"{victim} is {stated}, its upload made again gives {computed}")
                return
    stated, raised = ({flag.code for flag in flags} & {*OF_EVIDENCE} for flags in (record.flags, scored.flags))
    for code in sorted(raised - stated):
        notes.wrong(record, f"flag {code} is missing, which its upload made again raises")
    for code in sorted(stated - raised):
        notes.wrong(record, f"flag {code} is there, which its upload made again does not raise")


# -- the page ----------------------------------------------------------------------------------------------------------
_DRAWING = re.compile(r"<svg.*?</svg>", re.DOTALL)
_PAGE = "leaderboard.html"


def _page(store: Store, records: Sequence[Record]) -> Findings:
    """Compare the page that people read with one drawn now; count drawings that another matplotlib may have made."""
    pictures = [name for name in store.files.names("figures") if name.endswith((".svg", ".png"))]
    clause = not_checked("pictures", len(pictures), len(pictures), "they are not drawn again", "files of figures/")
    undrawn: tuple[str, ...] = (clause,) if pictures else ()
    if not store.files.holds(_PAGE):
        return Findings((), (not_checked("all", 1, 1, f"{_PAGE} is not here", "pages"), *undrawn))
    try:
        stated = store.files.read(_PAGE).decode()
    except (OSError, UnicodeDecodeError) as cause:
        return Findings((f"{_PAGE} cannot be read ({cause}); write it again",), undrawn)
    drawn = page_of(store, records, missing_sentences(records), PAPER_CLAIMS).html()
    if difference := texts_differ(_DRAWING.sub("<svg/>", stated), _DRAWING.sub("<svg/>", drawn)):
        again = "another version wrote it, or it was edited; write it again with `ppbench leaderboard`"
        return Findings((f"{_PAGE} {difference}: {again}",), undrawn)
    pairs = [*zip(_DRAWING.findall(stated), _DRAWING.findall(drawn), strict=True)]
    if other := sum(one != two for one, two in pairs):
        undrawn = (
            not_checked(
                "lines", other, len(pairs), "another matplotlib drew them, or they were edited", "drawings of the page"
            ),
            *undrawn,
        )
    return Findings((), undrawn, ("the page",))


def texts_differ(stated: str, expected: str) -> str:
    """Return where two texts differ first, in words, "" where they are equal."""
    if stated == expected:
        return ""
    at = next(
        (i for i, (a, b) in enumerate(zip(stated, expected, strict=False)) if a != b), min(len(stated), len(expected))
    )
    have, want = (one_line(text[max(0, at - 20) : at + 40], 70) for text in (stated, expected))
    return f"has {have!r} where the records give {want!r}"
