"""The ledger: figures of a transcript read back, the decision whether a row moves, what must not leave, addresses."""

import itertools
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import ledger_home
import numpy as np
import pytest
import torch
from ledger_home import VICTIMS, about, answered
from safetensors.torch import load_file, save_file
from test_fuzz import ended

from ppbench.adversary.attack import Guess
from ppbench.base.errors import UsageError
from ppbench.claims.check import claimed
from ppbench.federation.plan import Data
from ppbench.ledger import publish as freeze
from ppbench.ledger.form import counting_records, read_book
from ppbench.ledger.publish import publish
from ppbench.ledger.score import (
    LEDGER_ALPHA,
    answers_digest,
    decide,
    exchange_p,
    inquiry_of,
    open_truth,
    permutation_p,
    score,
    score_answers,
    standing_worst,
    try_level,
)
from ppbench.ledger.site import build_site
from ppbench.ledger.transcript import load_transcript
from ppbench.records.store import Store
from ppbench.run.cells import find_cell
from ppbench.run.experiment import resolve
from ppbench.run.scene import group_victims
from ppbench.run.sweep import missing_cells
from ppbench.verification import examine
from ppbench.verification.recheck import recheck

HARD, EASY = "dp", "spn"
"""A row whose worst case is below a blind guess, and one in which an attack rebuilds every image."""
SHAPE = (VICTIMS, 1, 1, 8, 8)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def truth(published, tmp_path):
    """A copy of the organizer's folder, which a test may change."""
    return shutil.copytree(published.truth, tmp_path / "truth")


# -- a round trip -----------------------------------------------------------------------------------------------------
@pytest.mark.nightly
def test_our_attacks_in_a_fresh_process_on_what_was_published_have_the_figures_of_their_cells(
    published, truth, tmp_path
):
    code = (
        "import sys, torch; torch.set_num_threads(1); sys.path.insert(0, sys.argv[1])\n"
        "from ledger_home import about\n"
        "from ppbench.ledger.score import save_guesses\n"
        "from ppbench.ledger.transcript import load_transcript\n"
        "for place in sys.argv[3:]:\n"
        "    frozen = load_transcript(place)\n"
        "    for name, kind, own in (('dlg', 'reconstruction', {'restarts': 0, 'budget': 30}),\n"
        "                            ('analytic', 'reconstruction', {}), ('label_recovery', 'label', {})):\n"
        "        told = about(frozen.about.id, kind, name)\n"
        "        save_guesses(f'{sys.argv[2]}/{name}-{frozen.about.id}.json', told, frozen.run(name, **own))\n"
    )
    places = [str(published.transcript(name)) for name in (HARD, EASY)]
    words = [sys.executable, "-c", code, str(Path(__file__).parent), str(tmp_path), *places]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in (HARD, EASY):
        frozen = published.frozen(name)
        ours = published.records(name) | published.records(name, "label")
        assert set(ours) == {"dlg", "analytic", "label_recovery"}
        for attack, cell in ours.items():
            scores = score(frozen, tmp_path / f"{attack}-{frozen.about.id}.json", truth)
            mine, theirs = ([v.model_dump() for v in r.victims] for r in (scores.record, cell))
            for one in (
                *mine,
                *theirs,
            ):  # what an answer is, not how it came about: this a file of guesses does not tell
                for how in ("path", "oracle", "at_truth"):
                    one.pop(how, None)
            assert mine == theirs, (name, attack)
            result = {m.name: m for m in scores.record.metrics} | {"oracle_median": 0, "at_truth_median": 0}
            assert result == {m.name: m for m in cell.metrics} | {"oracle_median": 0, "at_truth_median": 0}
            assert scores.record.asked == cell.asked and not scores.decision.moved


def test_the_same_results_give_the_same_files(published, truth, tmp_path):
    publish(truth, tmp_path / "again")
    assert files(tmp_path / "again") == files(published.out)
    assert files(truth / "truth") == files(published.truth / "truth")


# -- the decision -----------------------------------------------------------------------------------------------------
def test_a_row_moves_for_what_is_better_once_and_for_nothing_else(published, truth, tmp_path):
    frozen, images = published.frozen(HARD), published.images(HARD)
    draw = torch.Generator().manual_seed(0)
    near, nearer = (images + std * torch.randn(SHAPE, generator=draw) for std in (0.2, 0.05))

    def submit(x, name, **more):
        return score(frozen, answered(tmp_path, frozen.about.id, x, name=name, attack=name, **more), truth)

    first = submit(near, "near")
    assert first.decision.moved and "portfolio" in first.before.name and "the worst case moves" in first.receipt
    with pytest.raises(UsageError, match="scored before, as try 1"):
        submit(near, "again")
    record = Store(truth / "external").load(first.record.cell_id)
    stands = standing_worst(counting_records(truth, read_book(truth)), record)
    assert stands.name == "external:near"
    assert stands.metric("psnr_median").value == pytest.approx(first.decision.after, abs=1e-9)
    worse = submit(near + 0.01 * torch.randn(SHAPE, generator=draw), "worse")
    assert not worse.decision.moved and worse.before.name == "external:near"
    assert not submit(torch.full(SHAPE, 0.2), "constant").decision.moved
    assert worse.receipt == "try 2: not better than the worst case so far, at level 0.0068", (
        "no figure: it would lead to the truth"
    )
    last = submit(nearer, "nearer")
    assert last.decision.moved and last.decision.tries == 4
    assert [entry.moved for entry in read_book(truth)] == [True, False, False, True]
    assert standing_worst(counting_records(truth, read_book(truth)), record).name == "external:nearer"


def test_what_stands_already_does_not_move_it(published, truth, tmp_path):
    frozen = published.frozen(EASY)
    store, cell = Store(published.truth), published.records(EASY)["analytic"]
    x = torch.from_numpy(store.images(cell).guess).reshape(SHAPE)
    same = score(frozen, answered(tmp_path, frozen.about.id, x), truth)
    assert not same.decision.moved and same.decision.p == 1 and same.before.name == "analytic"


def test_labels_move_a_row_where_they_are_told_and_not_where_one_class_is_named(published, truth, tmp_path):
    frozen, right = published.frozen(HARD), published.labels(HARD)
    assert published.records(HARD, "label")["label_recovery"].metric("label_accuracy").value < 0.5
    common = torch.full_like(right, int(right.mode(0).values))
    assert not score(frozen, answered(tmp_path, frozen.about.id, y=common), truth).decision.moved
    assert score(frozen, answered(tmp_path, frozen.about.id, y=right, name="right"), truth).decision.moved


def test_levels_sum_to_alpha():
    tail = 2 * LEDGER_ALPHA / 2.612 / np.sqrt(100_000.5)
    assert sum(map(try_level, range(1, 100_001))) + tail == pytest.approx(LEDGER_ALPHA, rel=1e-4)
    assert try_level(1) < LEDGER_ALPHA / 2


def test_a_row_is_not_moved_by_a_metric_that_its_worst_case_lacks(fabricate, gained):
    old = fabricate("none", None, "dlg", "reconstruction")
    new = gained(old, 10.0)
    assert decide(old, [], new, 1).metric == "psnr_median"
    lacking = old.model_copy(update={"metrics": [m for m in old.metrics if m.name != "psnr_median"]})
    assert decide(lacking, [], new, 1).metric == "share_above_20db"


@pytest.mark.nightly
def test_noise_a_hundred_times_moves_nothing_and_then_what_is_spent_is_said(published):
    frozen, known = published.frozen(HARD), open_truth(published.frozen(HARD), published.truth)
    result = about(frozen.about.id)
    grey = [Guess(x=row) for row in torch.full(SHAPE, 0.5)]
    like, _, blind = score_answers(frozen, known, result, grey, "0" * 64)
    now = standing_worst(counting_records(published.truth, []), like)
    light, draw = replace(known, yardstick=None), torch.Generator().manual_seed(1)

    def decided(x, tries):
        answers = [Guess(x=row) for row in x]
        victims = inquiry_of(frozen, light, "reconstruction").score(answers).victims
        record = like.model_copy(update={"cell_id": answers_digest({"x": x})[:32], "victims": victims})
        return decide(now, blind, record, tries, lambda: exchange_p(frozen, light, "reconstruction", answers))

    mean = known.yardstick.mean
    for tries in range(1, 101):
        size = 10 ** (-2.5 * torch.rand((), generator=draw))
        noise = (0.5, mean, 0.9 * mean)[tries % 3] + size * torch.randn(SHAPE, generator=draw)
        assert not decided(noise.float(), tries).moved
    whole = published.images(HARD)
    assert decided(whole, 1).moved
    late = decided(whole, 101)
    assert not late.moved and "this transcript is spent" in late.reason


# -- answers that tell victims apart ----------------------------------------------------------------------------------
def test_answers_dealt_out_at_random_seem_to_tell_victims_apart_no_oftener_than_p_says():
    draw = np.random.default_rng(0)
    for ties in (1000, 1000, 4, 3, 2, 1):
        table = draw.integers(ties, size=(5, 5)).astype(float)
        deals = list(itertools.permutations(range(5)))
        result = np.array([permutation_p(5, lambda o, d=d, t=table: t[np.array(d)[o], np.arange(5)]) for d in deals])
        for p in np.unique(result):
            assert (result <= p).mean() <= p + 1e-12


def test_p_of_answers_that_fit_their_victims_alone_and_of_equal_ones():
    def p(table):
        return permutation_p(len(table), lambda order: table[order, np.arange(len(table))])

    assert p(np.eye(10)) == pytest.approx(1 / 3628800)
    assert p(np.ones((10, 10))) == 1 and p(-np.eye(10)) == 1 and p(np.eye(1)) == 1
    assert p(np.eye(120)) < 1e-100 and p(np.ones((120, 120))) == 1
    blocks = np.kron(np.eye(2), np.ones((5, 5)))
    assert p(blocks) == pytest.approx(5**10 / 3628800) or p(blocks) == 1


# -- what must not leave ----------------------------------------------------------------------------------------------
def test_a_view_that_holds_the_truth_is_not_published(truth, tmp_path, monkeypatch):
    real = freeze.probe_group

    def planted(*args):
        scene = real(*args)
        unit = scene.victims.units[0]
        x = scene.victims.truth(unit).x.clone()
        return scene._replace(view=replace(scene.view, public=Data(x, torch.zeros(len(x), 10))))

    monkeypatch.setattr(freeze, "probe_group", planted)
    with pytest.raises(UsageError, match="gives the truth away"):
        publish(truth, tmp_path / "out")
    assert files(tmp_path / "out") == {}


@pytest.mark.parametrize("secret", [ledger_home.SALT, bytes.fromhex(ledger_home.SALT).decode()])
def test_the_secret_of_the_draws_is_not_published(secret, truth, tmp_path, monkeypatch):
    monkeypatch.setattr(freeze, "model_code", lambda name: f"models:{secret}")
    with pytest.raises(UsageError, match="the secret of the draws"):
        publish(truth, tmp_path / "out")
    assert files(tmp_path / "out") == {}


def integers(value):
    """Yield all whole numbers in a JSON value."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from integers(part)
    elif type(value) is int:
        yield value


def test_no_number_in_a_transcript_draws_its_victims_again(published):
    transcript = json.loads((published.transcript(HARD) / "transcript.json").read_text())
    cell = published.records(HARD)["dlg"]
    experiment, group, _ = find_cell(cell.config, "digits", ledger_home.SALT)
    right = {row.numpy().tobytes() for row in published.images(HARD).flatten(1)}

    def same(config):
        result = group_victims(resolve(config), group)
        return sum(result.truth(unit).x.numpy().tobytes() in right for unit in result.units)

    assert same(experiment.config) == VICTIMS
    numbers = {number for number in integers(transcript) if number >= 0}
    assert set(transcript["draws"].values()) <= numbers
    for number in sorted(numbers):
        assert same(experiment.config.model_copy(update={"seed": number, "salt": ""})) <= VICTIMS // 2, number


def test_another_truth_is_not_what_was_committed_to(published, truth, tmp_path):
    frozen = published.frozen(HARD)
    guesses = answered(tmp_path, frozen.about.id, published.images(HARD))
    path = truth / "truth" / f"{frozen.about.id}.safetensors"
    whole = load_file(path)
    for name in ("x", "y"):
        changed = whole[name].clone()
        changed.view(-1)[0] += 1 / 1024
        save_file(whole | {name: changed}, path)
        code, out, err = ended(["score", str(published.transcript(HARD)), str(guesses), "--truth", str(truth)])
        assert code == 2 and out == "" and "is not the truth that transcript" in err
    assert not (truth / "ledger.jsonl").exists() and not (truth / "external").exists()


# -- addresses, pages, the command line -------------------------------------------------------------------------------
@pytest.mark.parametrize("what", ["network", "defense"])
def test_code_at_an_address_is_not_imported_unless_one_says_so(what, published, tmp_path, monkeypatch):
    from hostile_ledger import signed

    (tmp_path / "ledger_trap.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    there = shutil.copytree(published.transcript(HARD), tmp_path / "t")
    transcript = json.loads((there / "transcript.json").read_text())
    if what == "network":
        transcript["plan"]["spec"]["model"] = transcript["model"]["id"] = "ledger_trap:net"
    else:
        transcript["defense"]["id"] = "flower:ledger_trap:net"
    (there / "transcript.json").write_text(json.dumps(signed(transcript)))
    with pytest.raises(UsageError, match="imported only with your consent"):
        load_transcript(there)
    assert "ledger_trap" not in sys.modules
    with pytest.raises(UsageError):
        load_transcript(there, trust=True)


def test_markup_of_somebody_else_is_shown_and_not_obeyed(published, truth, tmp_path):
    frozen, nasty = published.frozen(HARD), "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"
    guesses = answered(
        tmp_path, frozen.about.id, published.images(HARD), reference=nasty, auxiliary=nasty, licence=nasty
    )
    assert score(frozen, guesses, truth).decision.moved
    build_site(published.out, truth, tmp_path / "site")
    page = (tmp_path / "site" / "index.html").read_text()
    assert "external:somebodys" in page and "&lt;script&gt;" in page
    code, _, err = ended(["leaderboard", str(truth / "external")])
    assert code == 0, err
    board = (truth / "external" / "leaderboard.html").read_text()
    assert "external:somebodys" in board
    for text in (page, board):
        assert "<script>alert" not in text and "<img src=x" not in text


def test_publish_and_score_at_the_command_line(published, truth, tmp_path, forked):
    suite, out = published.truth.parent / "tiny.toml", tmp_path / "out"
    code, message, err = ended(["publish", str(suite), "--out", str(out), "--truth", str(truth), "--workers", "1"])
    assert code == 0 and "4 transcripts" in message and "can look victims up" in err
    assert files(out) == files(published.out)
    code, message, _ = ended(["publish", str(truth), "--out", str(tmp_path / "two")])
    assert code == 0 and files(tmp_path / "two") == files(published.out)
    code, _, err = ended(["publish", str(truth), "--out", str(tmp_path / "no"), "--truth", str(truth)])
    assert code == 2 and "give --truth FOLDER with a suite" in err
    place, id_ = str(out / published.ids[HARD]), published.ids[HARD]
    for x, right in ((torch.zeros(SHAPE), 1), (published.images(HARD), 0), (published.images(HARD), 2)):
        code, message, err = ended(["score", place, str(answered(tmp_path, id_, x)), "--truth", str(truth)])
        assert code == right, err
        if right < 2:
            assert message.splitlines()[-1].startswith("For the submitter: try ")


def test_verify_finds_nothing_in_what_an_organizer_keeps_though_each_view_has_victims_of_its_own(published, truth):
    submitted = answered(truth.parent, published.ids[HARD], published.images(HARD))
    scores = score(published.frozen(HARD), submitted, truth)
    assert (
        scores.decision.moved
        and scores.decision.after == scores.record.metric("psnr_median").value == 100
        and scores.decision.before < 100
    )
    for folder in (truth, truth / "external"):
        assert examine(folder, claimed, recheck).problems == ()
    records = Store(truth).load_all()
    assert len({record.config.victims_from for record in records}) == len(published.ids)
    assert [result for result, problem in missing_cells(records) if problem] == []
