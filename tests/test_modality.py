"""A kind of data is one object: a sequence of integers comes from outside, and nobody else asks for shapes."""

import ast
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from rich.console import Console
from sequences_plugin import Sequences

from ppbench.adversary.attack import Guess
from ppbench.adversary.victims import Victims
from ppbench.attacks.reconstruction.ig import IG
from ppbench.base.errors import UsageError
from ppbench.claims.check import PAPER_CLAIMS
from ppbench.commands.terminal import glance
from ppbench.federation.plan import Data
from ppbench.federation.wire import Slot
from ppbench.metrics import modality as modalities
from ppbench.metrics.modality import (
    IMAGE,
    MASK,
    TABLE_ROW,
    Modality,
    modality_faults,
    modality_from,
    modality_of,
)
from ppbench.metrics.spec import Judgment, MetricSpec
from ppbench.questions.base import question_of
from ppbench.questions.image_metrics import ImageMetric
from ppbench.questions.images import score_images
from ppbench.questions.inquiry import Yardstick
from ppbench.questions.recognition import RECOGNITION_METRICS
from ppbench.records.store import Store
from ppbench.report.controls import check_controls, rebuilding, rebuilt_share
from ppbench.report.leak import leak_of
from ppbench.report.page.board import write_board
from ppbench.report.page.boards import boards_of, no_claims
from ppbench.report.page.headline import answer_of
from ppbench.report.verdict import sentences
from ppbench.report.worst import worst_case
from ppbench.task.dataset import Dataset, Split

PACKAGE = Path(__file__).parent.parent / "ppbench"
LENGTH, WORDS = 20, 50


class Sequence(Sequences):
    """Somebody else's kind of data, in one class."""

    inputs: ClassVar[str] = "sequences"


@pytest.fixture
def sequences(monkeypatch):
    made = Sequence()
    monkeypatch.setattr(modalities, "_installed", lambda: (made,))
    return made


def attacked(make, defense, right, attack="dlg", **more):
    """Return the cell of an attack on twelve sequences with these shares of right places; decibels say the opposite."""
    scores = [
        dict(kind="image", probe=i, client=0, index=0, psnr=50.0 * (1 - share), rmse=share, rmse_raw=share, mse=0.1,
             evaluations=1, blind=11.0, oracle=50.0, accuracy=share, blind_accuracy=0.2)
        | dict.fromkeys(("ssim", "label", "confidence", "at_truth"))
        for i, share in enumerate(right)
    ]  # fmt: skip
    data = dict(name="words", sha256="0" * 64, train=1000, test=1000, modality="sequence")
    about = dict(shape=(LENGTH,), loss="cross_entropy", classes=WORDS, data=data, control="sigma", scores=scores)
    return make(defense, None if defense in ("none", "full_noise") else 0.1, attack, "reconstruction", **about | more)


# -- found ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("shape", "task", "modality"),
    [
        ((3, 32, 32), "", IMAGE), ((1, 8, 8), "cross_entropy", IMAGE), ((1, 8, 8), "segmentation", MASK),
        ((3, 32, 32), "bce", MASK), ((16,), "squared", TABLE_ROW), ((16,), "", TABLE_ROW),
        ((4, 4), "", TABLE_ROW), ((), "", TABLE_ROW),
    ],
)  # fmt: skip
def test_shape_and_task_tell_the_modality(fabricate, shape, task, modality):
    assert modality_from(shape, task) is modality
    if shape:
        assert modality_of(fabricate("none", None, "dlg", "reconstruction", shape=shape, loss=task).config) is modality


def test_every_modality_says_all_that_is_asked_of_it(fabricate):
    for modality in modalities.modalities():
        for name in ("name", "noun", "inputs", "content", "headline", "figure", "title", "broken", "parts"):
            assert getattr(modality, name), name
    assert IMAGE.readers == tuple(RECOGNITION_METRICS)
    question = question_of("reconstruction")
    rows, images = (
        {
            rule.metric
            for rule in question.rules_of(fabricate("none", None, "dlg", "reconstruction", shape=shape).config)
        }
        for shape in ((7,), (1, 8, 8))
    )
    decibels = {"psnr_median", "share_above_20db"}
    assert decibels <= images - rows and "rmse_mean" in rows - images
    assert {rule.metric for rule in question.all_rules} == rows | images | {"reconstruction_accuracy"}  # of other kinds


def test_a_metric_that_compare_judges_says_how(fabricate):
    (score, *_) = fabricate("none", None, "dlg", "reconstruction").victims
    with pytest.raises(KeyError, match="ssim_mean"):
        question_of("reconstruction").judged(score, "ssim_mean")
    spec = MetricSpec("close", "Close", judgment=Judgment("mean", 0.02, 0.05))
    with pytest.raises(ValueError, match="metric close has a judgment; give `judged`"):
        ImageMetric(spec, lambda *_: None)


def test_modalities_come_by_entry_point(monkeypatch):
    modalities._installed.cache_clear()
    monkeypatch.setattr(modalities, "load_all", lambda group: {"sequence": Sequence} if group == "modalities" else {})
    assert modality_from((LENGTH,), name="sequence").name == "sequence" and modality_from((LENGTH,)) is TABLE_ROW
    modalities._installed.cache_clear()


@pytest.mark.parametrize(
    ("plugin", "name", "words"),
    [
        (Sequence, "sequence", ()),
        (Sequence(), "sequence", ("must be a class derived from",)),
        (Sequence, "text", ("has the name 'sequence', but is installed as 'text'",)),
        (type("Half", (Modality,), {"name": "half"}), "half", ("noun, inputs", "rebuilt, which a modality must")),
    ],
)
def test_what_is_no_modality_is_refused_where_it_is_loaded(plugin, name, words):
    sentences = [*modality_faults(plugin, name)]
    assert len(sentences) == bool(words) and all(word in sentences[0] for word in words)


def test_a_data_set_names_a_modality_that_there_is_and_that_suits_its_targets(sequences):
    part = Split(torch.rand(6, 4), torch.arange(6) % 2, 2)
    named = Dataset("d", part, part, 2, (4,), (0.0, 1.0), kind="sequence")
    assert named.modality is sequences and named.named_kind == "sequence"
    assert (replace(named, kind="").named_kind, replace(named, kind="row").named_kind) == ("", "")
    with pytest.raises(UsageError, match="no modality named 'sequnce'; did you mean 'sequence'"):
        replace(named, kind="sequnce")
    with pytest.raises(UsageError, match="is a classification of kind 'mask'"):
        replace(named, kind="mask")


def test_records_name_the_modality_only_where_shape_and_loss_do_not_say_it(fabricate):
    rows = fabricate("none", None, "dlg", "reconstruction", shape=(LENGTH,)).config
    named = rows.model_copy(update={"data": rows.data.model_copy(update={"modality": "sequence"})})
    assert "modality" not in rows.model_dump()["data"] and named.model_dump()["data"]["modality"] == "sequence"
    assert rows.cell_id() != named.cell_id() and rows.data.identity != named.data.identity


# -- a sequence of integers, from the guess to the page ---------------------------------------------------------------
def test_sequences_are_scored_beside_their_own_blind_guess(sequences):
    public = torch.tensor([[3.0, 7.0, 1.0]] * 3 + [[3.0, 9.0, 1.0], [40.0, 7.0, 2.0]])
    truth = torch.tensor([[3.0, 8.0, 1.0], [40.0, 9.0, 2.0]])
    slot = Slot(0, 0)
    victims = Victims({slot: Data(truth, torch.eye(2))}, ((slot,),), (), 2)
    blind = sequences.blind_guess(public)
    assert blind.tolist() == [3.0, 7.0, 1.0]
    guess = Guess(x=truth[[1, 0]] + 0.3)
    scored = score_images(victims, [guess], {}, {}, (0.0, 50.0), Yardstick(blind), modality=sequences)
    assert [v.accuracy for v in scored.victims] == [1.0, 1.0] and all(map(sequences.rebuilt, scored.victims))
    assert [v.blind_accuracy for v in scored.victims] == [pytest.approx(2 / 3), 0.0]
    assert scored.images is None and all(v.recognition is None and v.ssim is None for v in scored.victims)


def test_attacks_take_inputs_for_smooth_only_where_the_modality_says_so(plan, sequences):
    assert plan.spec.shape == (1, 8, 8) and IG(tv=0.1).penalty(plan).parts[0].weight == pytest.approx(0.1)
    assert IG(tv=0.1).penalty(replace(plan, kind="sequence")).parts[0].weight == 0.0


def test_rebuilt_is_what_the_modality_says_and_not_what_decibels_say(fabricate, sequences):
    record = attacked(fabricate, "dp", [0.95] * 6 + [0.9] * 3 + [0.85] * 3)
    assert modality_of(record.config) is sequences and rebuilding(record) == "reconstruction_accuracy"
    assert rebuilt_share(record).value == 0.75
    other = attacked(fabricate, "dp", [0.1] * 11 + [1.0], attack="ig")
    worst = worst_case([record, other], rebuilding(record))
    assert [v.accuracy for v in worst.victims] == [0.95] * 6 + [0.9] * 3 + [0.85] * 2 + [1.0]
    rows = record.config.data.model_copy(update={"modality": ""})
    as_rows = record.model_copy(update={"config": record.config.model_copy(update={"data": rows})})
    assert rebuilt_share(as_rows).value == 0.0


@pytest.mark.parametrize(
    ("right", "level", "words"),
    [
        ([0.95] * 12, "rebuilt", "sequences are rebuilt, share of right places 0.95"),
        ([0.7, 0.72, 0.74] * 4, "recognizable", "sequences are rebuilt in part, share of right places 0.72"),
        ([0.19, 0.2, 0.21] * 4, "blind", "sequences come out no better than blind, share of right places 0.20"),
    ],
)
def test_sentences_board_terminal_and_page_speak_of_sequences(fabricate, sequences, tmp_path, right, level, words):
    records = [
        attacked(fabricate, "none", [1.0] * 12),
        attacked(fabricate, "none", [1.0] * 12, "adaptive_dp", adaptive=True),
        attacked(fabricate, "full_noise", [0.2] * 12),
        attacked(fabricate, "dp", [0.1] * 12),
        attacked(fabricate, "dp", right, "adaptive_dp", adaptive=True),
    ]
    broken = "The best attack (adaptive_dp) breaks the undefended model: 100% of sequences come with 90% of their "
    assert check_controls(records)[0].sentence == f"{broken}places right."
    none = leak_of(records[:2], vouched=True)
    leak = leak_of(records[3:], vouched=True, none=none)
    assert (none.level, leak.level, leak.noun) == ("rebuilt", level, "sequences")
    assert words in sentences("dp", records)[0]

    (board,) = boards_of(records, no_claims)
    assert (board.headline, board.reliable, board.images) == ("reconstruction_accuracy", True, False)
    answer = answer_of(records, None)
    sentence = answer.headline.words
    assert level == "blind" or "share of right places" in sentence
    to = Console(file=io.StringIO(), width=200)
    to.print(glance(answer.tables[0], 200))
    assert f"{sorted(right)[6]:.1%}" in to.file.getvalue() or f"{sum(right) / 12:.1%}" in to.file.getvalue()
    store = Store(tmp_path)
    for record in records:
        store.save(record)
    write_board(store, PAPER_CLAIMS)
    page = (tmp_path / "leaderboard.html").read_text()
    assert "Worst case, places right" in page and words.partition(",")[0] in page
    assert not re.search(r"rows|images? (are|is) rebuilt|\d dB<", sentence)


# -- nobody else asks for shapes --------------------------------------------------------------------------------------
ALLOWED = {
    "metrics/modality.py": "the one place",
    "metrics/image.py": "SSIM's window slides over height and width",
    "metrics/perceptual.py": "a convolution takes batches of four axes",
    "federation/engine.py": "memory layout (channels-last)",
    "federation/drive.py": "memory layout (channels-last)",
    "federation/plan.py": "memory layout (channels-last)",
    "nets/": "what a network's layers take",
    "task/user_data.py": "which axis of an array holds the channels",
    "task/imagefolder.py": "channels of a file's pixels",
    "attacks/reconstruction/fastpath/": "what a traced layer takes",
    "attacks/reconstruction/patch_tokens.py": "what a traced layer takes",
    "attacks/reconstruction/row_spaces.py": "what a traced layer takes",
    "attacks/reconstruction/peel.py": "what a traced layer takes",
    "report/page/profiles.py": "a file of pictures may come from anyone",
}
"""Where axes are counted, and why: a tensor's layout, not the kind of data."""


def counted(source):
    """Yield the lines that compare a number of axes with 3 or more, or ask whether something is an image."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            numbers = {s.value for s in sides if isinstance(s, ast.Constant) and isinstance(s.value, int)}
            if numbers & {3, 4, 5} and any(map(_axes, sides)):
                yield node.lineno
            texts = {s.value for s in sides if isinstance(s, ast.Constant) and isinstance(s.value, str)}
            named = {n.attr for s in sides for n in ast.walk(s) if isinstance(n, ast.Attribute)}
            if texts & {"image", "tabular"} and "kind" in named:
                yield node.lineno
        if isinstance(node, ast.Call) and re.match(r"is_(image|table|row|mask|picture)", _name(node.func)):
            yield node.lineno
        if (
            isinstance(node, ast.arg)
            and node.arg == "pictures"
            and ast.unparse(node.annotation or node).find("bool") >= 0
        ):
            yield node.lineno


def _name(node):
    return getattr(node, "attr", getattr(node, "id", ""))


def _axes(node):
    """Return whether an expression counts axes: `len(shape)`, `x.dim()`, `x.ndim`."""
    if isinstance(node, ast.Call) and _name(node.func) == "len":
        return "shape" in ast.unparse(node.args[0])
    return _name(node) == "ndim" or (isinstance(node, ast.Call) and _name(node.func) == "dim")


def test_nobody_but_the_modalities_asks_for_the_number_of_axes():
    counts = {str(p.relative_to(PACKAGE)): [*counted(p.read_text())] for p in PACKAGE.rglob("*.py")}
    counts = {path: lines for path, lines in counts.items() if lines}
    assert not {path: lines for path, lines in counts.items() if not path.startswith(tuple(ALLOWED))}
    assert not {place for place in ALLOWED if not any(path.startswith(place) for path in counts)}, "no longer needed"
    planted = "len(config.model.shape) == 3", "x.dim() != 4", "3 != a.ndim", "is_image(record)", 'd.kind == "tabular"'
    planted += ("def f(pictures: bool): ...",)
    assert [*counted("\n".join(planted))].sort() is None and len([*counted("\n".join(planted))]) == len(planted)
