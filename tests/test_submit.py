"""Submissions: an honest one is accepted, and each thing that may be wrong with one is found by the check for it."""

import hashlib
import importlib
import io
import json
import shutil
import subprocess
import sys
import zipfile

import pytest
from installed_examples import EXAMPLES, lay_out
from typer.testing import CliRunner

from ppbench.base import registry
from ppbench.base.errors import UsageError
from ppbench.claims.check import claimed
from ppbench.commands import app
from ppbench.ledger import examination as due
from ppbench.ledger import examination as rerun
from ppbench.ledger.examination import (
    CHECKS,
    RerunTerms,
    case_of_archive,
    case_of_folder,
    draw_cells,
    first_difference,
    run_checks,
    too_many_moved,
    untolerated_difference,
)
from ppbench.ledger.submission import Package, submission_of, this_machine
from ppbench.records import sources
from ppbench.records.archive import SUBMISSION, pack_archive, unpack_archive
from ppbench.records.figure import aggregate
from ppbench.records.run_files import commit_of
from ppbench.records.store import Store, canonical_json
from ppbench.run import suite
from ppbench.run import sweep as complete
from ppbench.run.cells import cells, groups
from ppbench.run.suite import load_suite, with_salt
from ppbench.run.sweep import sweep
from ppbench.verification import verify
from ppbench.verification.recheck import recheck

pytestmark = pytest.mark.nightly

TINY = """\
schema = "ppbench.run.suite/1"
id = "tiny"
version = 1
title = "Tiny"

[task]
dataset = "digits"
model = "mlp"
clients = 3
train = 120

[federation]
rounds = 2

[questions]
attacks = ["analytic", "label_recovery", "tracing", "mia_loss"]
attack_batch = [1]
victims = 6
candidates = 40
tuning = 0
stages = ["init", "final"]

[[defense]]
id = "dp"
grid = [0.1]
"""
ONLY = {"defense": ["sign_sgd"]}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder of packages, as pip leaves them, with the example's defense; `tiny` and `whole` are shipped suites."""
    folder = tmp_path_factory.mktemp("site")
    lay_out(EXAMPLES / "my_defense", folder, requires=["pydantic>=2"])
    (folder / "tiny.toml").write_text(TINY)
    named = TINY[TINY.index("attacks =") : TINY.index("attack_batch")]
    (folder / "whole.toml").write_text(
        TINY.replace('"tiny"', '"whole"').replace(named, 'attacks = ["standard"]\n').replace(', "final"]', "]")
    )
    with pytest.MonkeyPatch.context() as patch:
        for module in (due, suite, complete):
            known = {**module.shipped(), **{name: folder / f"{name}.toml" for name in ("tiny", "whole")}}
            patch.setattr(module, "shipped", lambda known=known: known)
        patch.syspath_prepend(folder)
        forget()
        yield folder
    forget()
    sys.modules.pop("sign_sgd", None)


def forget():
    registry.plugins.cache_clear()
    sources.code_of.cache_clear()


@pytest.fixture(scope="module")
def honest(site, tmp_path_factory):
    out = tmp_path_factory.mktemp("honest") / "out"
    assert sweep(load_suite("tiny", add=["sign_sgd"]), out=out, engine="inline", only=ONLY).reliable
    shutil.rmtree(out / "cache")
    return out


@pytest.fixture
def unboarded(monkeypatch):
    monkeypatch.setattr(importlib.import_module("ppbench.run.evaluation"), "write_board", lambda store, claims: [])


@pytest.fixture
def out(honest, tmp_path):
    return shutil.copytree(honest, tmp_path / "out")


@pytest.fixture(scope="module")
def received(honest, tmp_path_factory):
    """The honest submission's archive, and what was said when it was handed in."""
    path = tmp_path_factory.mktemp("received") / "mine.zip"
    words = ["--out", path, "--licence", "Apache-2.0", "--paper", "Bernstein et al. 2018", "--workers", "1"]
    return path, run("submit", honest, *words)


def run(*words):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit | UsageError), result.exception
    code = 2 if isinstance(result.exception, UsageError) else result.exit_code
    return code, str(result.exception or "") + result.output


def checked(what, tmp_path, **terms):
    """Return what the checks of a folder or an archive find, by name; of cells again, "" where all holds."""
    home = tmp_path / f"scratch{len(list(tmp_path.iterdir()))}"
    home.mkdir()
    of = case_of_folder if what.is_dir() else case_of_archive
    result = list(run_checks(of(what, home, RerunTerms(workers=1, **terms))))
    assert [one.name for one in result] == list(CHECKS)
    return {one.name: one for one in result}


def failed(result):
    return {name: one.sentence for name, one in result.items() if one.ok is False}


def rewritten(out, change):
    """Write each record after a change, under the name of its configuration; None takes it away. Tables go."""
    store = Store(out)
    for record in store.load_all():
        new = change(record)
        if new is not record:
            for path in (out / "records").glob(f"{record.cell_id}.*"):
                path.unlink()
        if new is not record and new is not None:
            cell = new.config.cell_id()
            (out / "records" / f"{cell}.json").write_bytes(
                canonical_json(new.model_copy(update={"cell_id": cell, "artifacts": []}))
            )
    for name in ("leaderboard.csv", "worst_case.csv"):
        (out / name).unlink(missing_ok=True)


def worse_labels(record):
    """A forgery: all labels of a defended cell are told as not found, with all that follows from it."""
    if (record.config.defense.id, record.config.attack.id) != ("sign_sgd", "label_recovery"):
        return record
    victims = [victim.model_copy(update={"label": False}) for victim in record.victims]
    made = aggregate(victims, classes=10, seed=record.config.seed, delta=record.privacy.delta)
    return record.model_copy(update={"victims": victims, "metrics": made})


# -- an honest one -----------------------------------------------------------------------------------------------------
def test_an_honest_submission_is_handed_in_and_accepted(received, site):
    path, (code, result) = received
    assert code == 0, result
    lines = [line.split()[:2] for line in result.splitlines() if line.startswith("pass")]
    assert lines == [["pass", name] for name in CHECKS] and result.strip().endswith(str(path))
    assert "agree bit for bit" in result
    about = submission_of(Store(path).files)
    (entry,) = about.plugins
    assert (entry.group, entry.name, entry.package, entry.version) == (
        "defenses",
        "sign_sgd",
        "ppbench-sign-sgd",
        "0.1.0",
    )
    assert entry.code == sources.code_of(("defenses", "sign_sgd")) and entry.commit == ""
    assert (about.suite, about.digest, about.licence) == ("tiny/1", load_suite("tiny").digest, "Apache-2.0")
    assert {"numpy", "torch", "pydantic"} <= {one.name for one in about.environment.packages}
    code, result = run("submit", "--check", path, "--workers", 1)
    assert code == 0 and result.strip().endswith("Accepted."), result
    seed, first = (words.partition("--seed ")[2].partition(")")[0] for words in (result, received[1][1]))
    assert seed != first and int(seed) >= 0
    assert run("submit", "--check", path, "--workers", 1, "--seed", seed)[1] == result, "it draws the same cells"


def test_an_archive_of_a_submission_is_one_of_results(received, honest, tmp_path):
    path, _ = received
    assert verify(path, claimed, recheck) == []
    assert unpack_archive(path, tmp_path / "back") == []
    assert pack_archive(tmp_path / "back", tmp_path / "again.zip") == []
    assert (tmp_path / "again.zip").read_bytes() == path.read_bytes()
    assert not (honest / SUBMISSION).exists(), "the submitter's folder stays as it was"


def test_cells_of_other_defenses_of_the_suite_may_come_along(out, tmp_path, unboarded):
    sweep(load_suite("tiny"), out=out, engine="inline")
    rewritten(out, lambda record: record)
    failures = checked(out, tmp_path)
    assert failed(failures) == {} and "of none, full_noise, sign_sgd" in failures["complete"].sentence


# -- each thing that may be wrong -------------------------------------------------------------------------------------
def test_an_altered_score_and_an_altered_name_are_found_by_verify_and_nothing_is_written(out, tmp_path):
    store = Store(out)
    first, second = (out / "records" / f"{cell}.json" for cell in store.ids()[:2])
    data = json.loads(first.read_text())
    data["metrics"][0]["value"] += 0.25
    first.write_text(json.dumps(data))
    code, message = run("submit", out, "--workers", 1, "--out", tmp_path / "a.zip")
    assert (
        code == 1 and "FAIL     verify" in message and "not made again" in message and "Nothing was written." in message
    )
    assert not (tmp_path / "a.zip").exists()
    second.rename(second.with_name("0" * 32 + ".json"))
    assert "holds cell" in failed(checked(out, tmp_path))["verify"]


def test_cells_of_another_state_of_the_suite_are_none_of_it(out, tmp_path):
    rewritten(out, lambda r: r.model_copy(update={"config": r.config.model_copy(update={"suite_digest": "0" * 16})}))
    failures = failed(checked(out, tmp_path))
    assert "ppbench comes with tiny/1" in failures["suite"] and "complete" not in failures
    rewritten(out, lambda r: r.model_copy(update={"config": r.config.model_copy(update={"suite": "other/1"})}))
    assert failed(checked(out, tmp_path))["suite"] == "No suite that comes with ppbench is called 'other'."


def test_an_attack_that_got_a_smaller_budget_is_no_cell_of_the_suite(out, tmp_path):
    def lamed(record):
        attack = record.config.attack
        if record.config.attack.id != "analytic":
            return record
        attack = attack.model_copy(update={"parameters": {**attack.parameters, "tolerance": 1.0}})
        return record.model_copy(update={"config": record.config.model_copy(update={"attack": attack})})

    rewritten(out, lamed)
    assert "are none of tiny/1 as it is here" in failed(checked(out, tmp_path))["suite"]


def test_an_attack_left_out_everywhere_is_missing_though_verify_cannot_know(out, tmp_path):
    rewritten(out, lambda r: None if r.config.attack.id == "mia_loss" else r)
    failures = failed(checked(out, tmp_path))
    assert set(failures) <= {"complete", "verify"} and "under mia_loss" in failures["complete"]


def test_controls_that_follow_attacks_of_defenses_that_are_not_there_are_not_missing(site, tmp_path):
    path = tmp_path / "followed.toml"
    path.write_text(TINY.replace('"analytic",', '"analytic", "adaptive_dp",'))
    rescored = load_suite(path, add=["sign_sgd"])
    every = {c.id: c.config for e in rescored.places for g in groups(e) for c in cells(e, g)}
    mine = [e for e in rescored.places if e.config.defense == "sign_sgd"]
    have = [c.config for e in mine for g in groups(e) for c in cells(e, g)]
    assert any(config.attack.follows == "adaptive_dp" for config in every.values())
    assert not [result for result, wrong in complete._compare("tiny/1", [*every.values()], have) if wrong]
    torn = [config for config in have if config.attack.follows is None or config.defense.id != "none"]
    assert [wrong for _, wrong in complete._compare("tiny/1", [*every.values()], torn)].count(True) == 1


def test_a_control_value_left_out_is_missing(out, tmp_path):
    rewritten(out, lambda r: None if r.config.defense.control and r.config.defense.control.value == 3 else r)
    assert "such as sign_sgd under" in failed(checked(out, tmp_path))["complete"]


def test_controls_that_did_not_run_or_a_self_test_that_is_not_there_fail(out, tmp_path):
    (out / "selftest.json").unlink()
    assert "harness: Not known" in failed(checked(out, tmp_path))["controls"]
    rewritten(out, lambda r: None if r.config.defense.id == "none" else r)
    failures = failed(checked(out, tmp_path))
    assert "control none" in failures["controls"] and "such as none under" in failures["complete"]


def test_a_plugin_that_was_edited_after_the_run_is_other_code(site, out, received, tmp_path):
    module = site / "sign_sgd" / "__init__.py"
    before = module.read_text()
    try:
        module.write_text(before.replace("digits: int = 5", "digits: int = 5  # better"))
        forget()
        failures = checked(out, tmp_path)
        assert "are of other code than what is installed here" in failed(failures)["code"]
        assert failures["suite"].ok is None and failures["again"].ok is None
        code, message = run("submit", "--check", received[0], "--workers", 1)
        assert code == 1 and "is handed in; here is ppbench-sign-sgd 0.1.0" in message and "Not accepted." in message
    finally:
        module.write_text(before)
        forget()


def test_what_is_handed_in_must_be_installed_where_it_is_judged(site, received, out, monkeypatch):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(site)])
    forget()
    code, message = run("submit", "--check", received[0])
    assert code == 2 and "install ppbench-sign-sgd in version 0.1.0" in message
    code, message = run("submit", out)
    assert code == 2 and "is no plugin of a package that is installed here" in message
    monkeypatch.undo()
    forget()


def test_a_forgery_that_verify_cannot_see_is_what_computing_again_is_for(out, tmp_path):
    rewritten(out, worse_labels)
    assert verify(out, claimed, recheck) == []
    records = Store(out).load_all()
    forged = [r.cell_id for r in records if worse_labels(r) is not r]
    hit, missed = (
        next(s for s in range(99) if bool({*draw_cells(records, 0.1, s)} & {*forged}) is w) for w in (True, False)
    )
    failures = failed(checked(out, tmp_path, seed=hit))
    message = failures.pop("again")
    assert (
        failures == {}
        and "sign_sgd under label_recovery" in message
        and "label is False, computed again True" in message
    )
    assert failed(checked(out, tmp_path, seed=missed)) == {}, "a tenth of the cells finds a forged one in ten times"


# -- archives that are meant to harm, and what is none -----------------------------------------------------------------
def put(path, into, **members):
    """Write an archive again with other members, as anyone could."""
    out = io.BytesIO()
    with zipfile.ZipFile(path) as opened, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as made:
        for name in opened.namelist():
            if name not in members:
                made.writestr(name, opened.read(name))
        for name, data in members.items():
            if data is not None:
                made.writestr(name, data)
    into.write_bytes(out.getvalue())
    return into


def test_archives_that_are_meant_to_harm_are_refused_before_anything_is_unfolded(received, tmp_path):
    path, _ = received
    evil = [
        ({"../../evil.json": "{}"}, "is no file of results"),
        ({"/etc/passwd": "x"}, "is no file of results"),
        ({"records/x.py": "x"}, "is no file of results"),
        ({"sources.json": b"0" * (1 << 25)}, "it would unfold to"),
        ({SUBMISSION: None}, "is no submission"),
        ({SUBMISSION: "{}"}, "does not have the required form"),
        ({SUBMISSION: canonical_json(submission_of(Store(path).files)).replace(b'"day"', b'"more": 1, "day"')}, "more"),
        ({SUBMISSION: b"[" * 100_000}, "does not have the required form"),
    ]
    for place, (members, result) in enumerate(evil):
        code, printed = run("submit", "--check", put(path, tmp_path / f"{place}.zip", **members))
        assert code == 2 and result in printed, (members.keys(), printed)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"{place}.zip" for place in range(len(evil))]
    (tmp_path / "0.zip").write_bytes(path.read_bytes()[:-100])
    assert run("submit", "--check", tmp_path / "0.zip")[0] == 2


def test_what_cannot_be_handed_in_is_refused_in_a_sentence(out, honest, received, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "holds no records" in run("submit", tmp_path / "empty")[1]
    assert run("submit", tmp_path / "nowhere")[0] == 2
    assert "is an archive" in run("submit", received[0], "--out", tmp_path / "a.zip")[1]
    assert "is there already" in run("submit", out, "--out", received[0])[1]
    assert "for the submitter" in run("submit", "--check", received[0], "--licence", "MIT")[1]
    assert "licence" in run("submit", out, "--licence", "x" * 101)[1]
    assert "is no file" in run("submit", "--check", out)[1]
    ours = shutil.copytree(honest, tmp_path / "ours")
    rewritten(ours, lambda r: None if r.config.defense.code else r)
    assert "another package, so there is nothing to hand in" in run("submit", ours)[1]
    rewritten(out, lambda r: r.model_copy(update={"config": r.config.model_copy(update={"suite_digest": ""})}))
    assert "Cells of no suite cannot be handed in" in run("submit", out)[1]
    first = Store(out).ids()[0]
    rewritten(
        out,
        lambda r: r.model_copy(
            update={"config": r.config.model_copy(update={"suite_digest": "0" if r.cell_id == first else "1"})}
        ),
    )
    code, message = run("submit", out)
    assert code == 2 and "Cells of one suite" in message


# -- secrets, drawing, comparing ---------------------------------------------------------------------------------------
def test_cells_drawn_with_a_secret_need_it(site, tmp_path, unboarded):
    out, salt = tmp_path / "secret", "ab" * 32
    rescored = with_salt(load_suite("tiny", add=["sign_sgd"], isolate=False), salt)
    sweep(rescored, out=out, engine="inline", only=ONLY)
    shutil.rmtree(out / "cache")
    assert (out / "salt").read_text().strip() == salt
    (tmp_path / "scratch").mkdir()
    pack_archive(out, tmp_path / "s.zip", canonical_json(case_of_folder(out, tmp_path / "scratch", RerunTerms()).about))
    assert "salt" not in zipfile.ZipFile(tmp_path / "s.zip").namelist()
    code, message = run("submit", "--check", tmp_path / "s.zip")
    assert code == 2 and "--salt FILE" in message
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "salt").write_text("cd" * 32)
    assert run("submit", "--check", tmp_path / "s.zip", "--salt", tmp_path / "other" / "salt")[0] == 2
    assert "There is no file" in run("submit", "--check", tmp_path / "s.zip", "--salt", tmp_path / "x" / "salt")[1]
    code, message = run("submit", "--check", tmp_path / "s.zip", "--salt", out / "salt", "--workers", 1)
    assert code == 0, message


@pytest.fixture
def attacked(site, tmp_path, monkeypatch, unboarded):
    """Results of the example's attack, isolated, and the folder of packages where it lies."""
    lay_out(EXAMPLES / "my_attack", tmp_path / "more")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "more"))
    monkeypatch.syspath_prepend(tmp_path / "more")
    forget()
    out = tmp_path / "attacked"
    sweep("whole", out=out, engine="inline", only={"attack": ["row_ratio"]})
    yield out
    monkeypatch.undo()
    forget()


def test_an_attack_is_handed_in_and_runs_apart_again(attacked, tmp_path):
    failures = checked(attacked, tmp_path, share=0.0)
    assert failed(failures) == {}, failures


def test_cells_are_drawn_of_both_kinds_by_a_seed_that_anyone_can_repeat(honest):
    records = Store(honest).load_all()
    theirs = {r.cell_id for r in records if r.config.defense.code}
    for share, seed in ((0.0, 1), (0.1, 2), (0.1, 3), (1.0, 4)):
        result = draw_cells(records, share, seed)
        assert result == draw_cells(records[::-1], share, seed) and len({*result}) == len(result)
        expected = [max(1, -(-round(share * 1000) * n // 1000)) for n in (len(theirs), len(records) - len(theirs))]
        assert [len({*result} & theirs), len({*result} - theirs)] == expected
    draws = {draw_cells(records, 0.1, seed) for seed in range(20)}
    assert len(draws) > 10
    first = min(theirs, key=lambda cell: hashlib.sha256(f"2/{cell}".encode()).digest())
    assert first in draw_cells(records, 0.0, 2)


def test_bit_for_bit_means_every_score_and_whatever_is_computed(cell):
    record = cell()
    assert first_difference(record, record) == ""
    elsewhere = record.environment.model_copy(update={"python": "3.12"})
    memory = record.cost.model_copy(update={"memory_peak": 5})
    assert first_difference(record, record.model_copy(update={"environment": elsewhere, "cost": memory})) == ""
    victims = [*record.victims]
    victims[3] = victims[3].model_copy(update={"psnr": victims[3].psnr + 1e-12})
    assert first_difference(record, record.model_copy(update={"victims": victims})).startswith("victim 3: psnr is ")
    assert "status" in first_difference(record, record.model_copy(update={"status": "diverged"}))
    dearer = record.cost.model_copy(update={"bytes_up": 1.0})
    assert "cost differs" in first_difference(record, record.model_copy(update={"cost": dearer}))
    better = record.utility.model_copy(update={"accuracy": 0.5})
    assert "utility differs" in first_difference(record, record.model_copy(update={"utility": better}))


def test_another_machine_may_move_last_bits_and_single_paths_and_no_more(cell, gained, rescored):
    record = cell()
    assert untolerated_difference(record, record) == ""
    assert untolerated_difference(record, gained(record, 1e-6)) == "" != first_difference(record, gained(record, 1e-6))
    noisy = [v.model_copy(update={"psnr": v.psnr + (-1) ** i * 0.3}) for i, v in enumerate(record.victims)]
    assert untolerated_difference(record, rescored(record, asked=record.asked, victims=noisy)) == ""
    failures = untolerated_difference(record, gained(record, 9.0).model_copy(update={"asked": record.asked}))
    assert "computed again" in failures and "another machine explains 8" in failures
    assert untolerated_difference(record, gained(record, 3.0).model_copy(update={"asked": record.asked})) == ""
    for changes in ({"status": "diverged"}, {"asked": "0" * 32}):
        assert untolerated_difference(record, record.model_copy(update=changes)).startswith(next(iter(changes)))
    dearer = record.cost.model_copy(update={"bytes_up": 1.0})
    assert untolerated_difference(record, record.model_copy(update={"cost": dearer})).startswith("bytes")
    claim = record.privacy.model_copy(update={"epsilon": 1.0, "delta": 1e-5, "reason": None})
    assert untolerated_difference(record, record.model_copy(update={"privacy": claim})).startswith("epsilon")
    worse = record.utility.model_copy(update={"accuracy": 0.5, "low": 0.47, "high": 0.53})
    assert untolerated_difference(record, record.model_copy(update={"utility": worse})).startswith("accuracy")


@pytest.mark.parametrize("count", [1, 10, 103, 1000])
def test_a_forged_cell_is_seen_among_however_many(cell, gained, count):
    """A median PSNR of 65.7 dB stated as 9: a level divided by the number of cells did not see it from 103 on."""
    record = cell(share=65.7)
    forged = gained(record, -56.7).model_copy(update={"asked": record.asked})
    assert "psnr_median is" in untolerated_difference(forged, record), count
    record = cell(share=20.0)
    moved = gained(record, 2.0).model_copy(update={"asked": record.asked})
    pairs = [(record, record)] * (count - count // 2) + [(moved, record)] * (count // 2)
    assert bool(too_many_moved(pairs)) == (count >= 10), "each within its bound, a half of all are too many"
    assert too_many_moved([(moved, record), *[(record, record)] * (count - 1)]) == ""


def test_a_claim_of_another_machine_costs_a_larger_share(received, tmp_path, monkeypatch):
    path, _ = received
    about = submission_of(Store(path).files)
    shares = []
    monkeypatch.setattr(rerun, "draw_cells", lambda records, share, seed: shares.append(share) or 1 / 0)
    for environment in (about.environment, about.environment.model_copy(update={"processor": "Other (AVX512)"})):
        manifest = canonical_json(about.model_copy(update={"environment": environment}))
        new = put(path, tmp_path / f"{len(shares)}.zip", **{SUBMISSION: manifest})
        with pytest.raises(ZeroDivisionError):
            checked(new, tmp_path)
    assert shares == [rerun.RERUN_SHARE, rerun.MACHINE_SHARE] == [0.1, 0.3]


def test_which_comparison_applies_is_told(received, tmp_path, monkeypatch):
    path, _ = received
    about = submission_of(Store(path).files)
    other = about.environment.model_copy(update={"processor": "Other (AVX512)"})
    new = put(path, tmp_path / "n.zip", **{SUBMISSION: canonical_json(about.model_copy(update={"environment": other}))})
    result = checked(new, tmp_path)["again"]
    assert result.ok and "within the tolerance of another machine (processor Other (AVX512), here " in result.sentence
    here = this_machine()
    assert here.unlike(here) == ()
    older = [replace_version(one) for one in here.packages]
    assert any(
        c.startswith("numpy 0.1, here ") for c in here.model_copy(update={"packages": tuple(older)}).unlike(here)
    )
    assert rerun.TOLERANCE_WORDS in result.sentence


def replace_version(one):
    return Package(name=one.name, version="0.1") if one.name == "numpy" else one


def test_the_commit_is_that_of_unchanged_files_alone(tmp_path):
    def git(*words):
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True)

    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "__init__.py").write_text("")
    assert commit_of(tmp_path / "p") == ""
    git("init", "-q")
    assert commit_of(tmp_path / "p") == "", "files that are not kept are of no commit"
    git("add", ".")
    git("commit", "-qm", "one")
    assert len(commit_of(tmp_path / "p")) == 40
    (tmp_path / "p" / "__init__.py").write_text("# changed")
    assert commit_of(tmp_path / "p") == ""
    assert commit_of(tmp_path / "nowhere") == ""
