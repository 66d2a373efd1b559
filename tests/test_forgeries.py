"""Forgeries by who knows the format: names, digests, aggregates, flags and tables are made again after each."""

import hashlib
import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import numpy as safe

import ppbench
from ppbench.base.errors import UsageError
from ppbench.metrics.image import PSNR_CAP
from ppbench.metrics.intervals import clopper_pearson
from ppbench.metrics.modality import IMAGE
from ppbench.questions.base import question_of
from ppbench.questions.image_metrics import score_figures
from ppbench.questions.images import blind_decibels, flags_of, inexact
from ppbench.questions.reconstruction import RECOMPUTED
from ppbench.records.figure import aggregate
from ppbench.records.schema import Record
from ppbench.records.store import Store, canonical_json
from ppbench.report.compare.outcome import compare
from ppbench.report.page.boards import boards_of, no_claims, worst_csv, write_csv
from ppbench.run.sweep import missing_cells
from ppbench.verification import examine
from ppbench.verification.recheck import recheck

ASKED = dict(
    defense="dp_sgd", grid=(1.0, 2.0), rounds=1, clients=2, train=120, victims=4, attack_batch=(2,), candidates=10,
    attacks=("analytic", "label_recovery", "tracing", "mia_loss"), stages=("init", "final"), workers=1, model="mlp",
    tuning=0,
)  # fmt: skip


@pytest.fixture(scope="module")
def honest(tmp_path_factory, undrawn):
    out = tmp_path_factory.mktemp("honest") / "out"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ppbench.evaluate(out=out, **ASKED)
    return out


@pytest.fixture
def out(honest, tmp_path):
    return shutil.copytree(honest, tmp_path / "out")


def remade(data):
    """Return a forged record with all that follows from it made again, as who knows the format would."""
    data["metrics"] = []
    draft = Record.model_validate_json(json.dumps(data))
    config, scores = draft.config, draft.victims
    flags = [flag for flag in draft.flags if flag.code not in RECOMPUTED]
    if scores and question_of(config.attack.kind).inputs:
        raised = (*inexact(scores), *flags_of(scores, [], (0.0, 1.0)))
        flags = [flag for flag in raised if flag.code not in data.get("hidden", ())] + flags
    made = aggregate(scores, classes=config.model.classes, seed=config.seed, delta=draft.privacy.delta)
    return draft.model_copy(update={"cell_id": config.cell_id(), "metrics": made, "flags": flags})


class Forger:
    def __init__(self, out):
        self.out, self.store = out, Store(out)

    def cells(self, kind="reconstruction", defense="dp_sgd"):
        records = [r for r in self.store.load_all() if (r.config.attack.kind, r.config.defense.id) == (kind, defense)]
        return [r for r in records if r.status == "complete"]

    def forge(self, record, change, images=None):
        """Write a record after `change`, its reconstructions after `images`, in the place of the old one."""
        data = json.loads(canonical_json(record))
        change(data)
        kept = self.store.images(record)
        tensors = None if kept is None else {"guess": kept.guess, "truth": kept.truth, "blind": kept.blind}
        if images is not None:
            images(tensors)
        made = remade(data)
        for path in (self.out / "records").glob(f"{record.cell_id}.*"):
            path.unlink()
        self.store.save(made, seconds=1.0, tensors=tensors)
        return made

    def tables(self):
        for path in (self.out / "leaderboard.csv", self.out / "worst_case.csv"):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.out / "cache", ignore_errors=True)  # it does not travel
        records = self.store.load_all()
        ranked = boards_of(records, no_claims)
        write_csv(records, self.store.csv_path, boards=ranked)
        (self.out / "worst_case.csv").write_text(worst_csv(ranked))


def problems(out):
    return list(examine(out, None, recheck).problems)


def truth_replaced(forger):
    record = forger.cells()[0]
    images = forger.store.images(record)
    other = np.ascontiguousarray(images.truth[:, :, ::-1])

    def change(data):
        for place, score in enumerate(data["victims"]):
            pair = torch.from_numpy(images.guess[place]), torch.from_numpy(other[place])
            score.update(score_figures(*pair, (0, 1), IMAGE))
            score.update(blind=blind_decibels(torch.from_numpy(images.blind[0]), pair[1], (0, 1)), oracle=PSNR_CAP)

    forger.forge(record, change, lambda tensors: tensors.update(truth=other))


def epsilon_in_all(forger):
    for record in forger.store.load_all():
        if record.privacy.epsilon:
            forger.forge(record, lambda d: d["privacy"].update(epsilon=d["privacy"]["epsilon"] / 2))


def probe_epsilon_in_one(forger):
    """A larger epsilon of the probed upload, so that nothing found in it refutes the mechanism."""
    record = next(r for r in forger.store.load_all() if r.privacy.probe_epsilon is not None)
    forger.forge(record, lambda d: d["privacy"].update(probe_epsilon=40.0))


def probe_epsilon_in_all(forger):
    for record in forger.store.load_all():
        if record.privacy.probe_epsilon:
            forger.forge(record, lambda d: d["privacy"].update(probe_epsilon=40.0))


def perfect(data):
    n = data["utility"]["n"]
    ends = clopper_pearson(n, n)
    curve = [[data["utility"]["curve"][-1][0], 1.0]]
    data["utility"].update(accuracy=1.0, low=ends.low, high=ends.high, curve=curve)


def flags_gone(forger):
    record = next(r for r in forger.cells() if any(f.code in RECOMPUTED for f in r.flags))
    path = forger.out / "records" / f"{record.cell_id}.json"
    path.write_bytes(canonical_json(record.model_copy(update={"flags": []})))


def swapped(forger):
    one = forger.cells(defense="none")[0]
    other = next(r for r in forger.cells() if r.victims != one.victims)
    a, b = (json.loads(canonical_json(r))["victims"] for r in (one, other))
    forger.forge(one, lambda d: d.update(victims=b))
    forger.forge(other, lambda d: d.update(victims=a))


def recognized(forger):
    def change(data):
        for score in data["victims"]:
            score["recognition"].update(rank=(score["recognition"]["rank"] + 5) % 300)

    forger.forge(forger.cells()[0], change)


def stripped(forger):
    record = forger.cells()[0]
    path = forger.out / "records" / f"{record.cell_id}.json"
    path.write_bytes(canonical_json(record.model_copy(update={"artifacts": []})))


ACTS = {
    truth_replaced: "originals beside its scores", epsilon_in_all: "its mechanism's",
    probe_epsilon_in_one: "guarantee of its probe", probe_epsilon_in_all: "guarantee of its probe",
    flags_gone: "is missing, which its scores", swapped: "its images give", recognized: "recognition of victim",
    stripped: "files of reconstructions",
}  # fmt: skip
CHANGES = {  # of the first cell of a kind, and of a defense, with what is said of it
    "lowered": ((), lambda d: [v.update(psnr=5.0, rmse=0.9, mse=0.3, oracle=9.0) for v in d["victims"]], "its images"),
    "epsilon in one": (("label",), lambda d: d["privacy"].update(epsilon=0.01), "privacy"),
    "accuracy in one": ((), perfect, "utility is not that of"),
    "members": (("membership",), lambda d: [v.update(member=not v["member"]) for v in d["victims"]], "its victims"),
    "owners": (("tracing",), lambda d: [v.update(owner=v["guess"] ^ 1) for v in d["victims"]], "its victims"),
    "renamed questions": (("label",), lambda d: d.update(asked="0" * 16), "has the digest"),
    "victims dropped": (("label",), lambda d: d.update(victims=d["victims"][:-1]), "its victims"),
    "failed": ((), lambda d: d.update(status="diverged", reason="it broke"), "only a complete cell"),
    "cost lowered": ((), lambda d: d["cost"].update(bytes_up=1.0), "cost is not that of"),
    "adaptive": ((), lambda d: d["config"]["attack"].update(adaptive=True), "says the opposite"),
    "other data": (("label",), lambda d: d["config"]["data"].update(sha256="0" * 64), "no such federation"),
    # a control's cell passed off as another seed's: its victims are not those that this seed draws
    "another seed": (("label", "none"), lambda d: d["config"].update(seed=7), "seed 7"),
}


def test_what_nobody_touched_is_sound_and_says_what_was_not_checked(honest):
    result = examine(honest, None, recheck)
    assert result.problems == () and any("only running them again" in clause for clause in result.unchecked)


@pytest.mark.parametrize("forgery", [*ACTS, *CHANGES], ids=lambda forgery: getattr(forgery, "__name__", forgery))
def test_a_forgery_is_named(out, forgery):
    forger = Forger(out)
    if forgery in ACTS:
        forgery(forger)
        words = ACTS[forgery]
    else:
        cell, change, words = CHANGES[forgery]
        forger.forge(forger.cells(*cell)[0], change)
    forger.tables()
    failures = problems(out)
    assert any(words in problem for problem in failures), failures[:5]


def test_accuracy_forged_in_all_cells_of_a_training_is_named_where_the_cache_is_there_alone(out):
    forger = Forger(out)
    for record in forger.store.load_all():
        if record.config.defense.id == "none":
            forger.forge(record, perfect)
    assert any("is not what the training in cache/" in problem for problem in problems(out))
    forger.tables()
    assert problems(out) == [], "docs/verify.md says that this takes training again"


def test_a_reconstruction_that_is_replaced_and_scored_rightly_takes_running_the_attack_again(out):
    forger = Forger(out)
    record = forger.cells()[0]
    images = forger.store.images(record)
    mean = np.repeat(images.blind, len(images.truth), axis=0)

    def change(data):
        for place, score in enumerate(data["victims"]):
            guess, truth = torch.from_numpy(mean[place]), torch.from_numpy(images.truth[place])
            score.update(score_figures(guess, truth, (0, 1), IMAGE), oracle=PSNR_CAP)
            score["recognition"].update(rank=0)

    forger.forge(record, change, lambda tensors: tensors.update(guess=mean))
    forger.tables()
    (problem,) = problems(out)
    assert "recognition" in problem, "all but that was made again: docs/verify.md says so"


@pytest.fixture(scope="module")
def quick():
    archive = Path(__file__).parents[1] / "leaderboards" / "results" / "digits-quick" / "records.zip"
    return Store(archive).readable()[0]


def test_a_cell_taken_from_a_suite_is_missed_and_a_filtered_sweep_is_told(quick):
    strongest = next(r for r in quick if r.config.defense.id == "dp" and r.config.attack.id == "adaptive_dp")
    (lack,) = missing_cells([r for r in quick if r is not strongest])
    assert lack[1] and lack[0].startswith("1 of the 629 cells of suite digits-quick/1 are missing, such as dp sigma=")
    kept = [r for r in quick if r.config.attack.id != "label_recovery"]
    ((sentence, problem),) = missing_cells(kept)
    assert not problem and f"{629 - len(kept)} of the 629 cells" in sentence and "--only" in sentence


def test_what_verify_names_in_the_records_alone_compare_refuses(honest, out):
    Forger(out).forge(Forger(out).cells()[0], lambda d: d["cost"].update(bytes_up=1.0))
    with pytest.raises(UsageError, match=r"NEW: .*cost is not that of.*ppbench verify"):
        compare(honest, out)


# -- any field, any wrong value ---------------------------------------------------------------------------------------
WRONG = [-1, -0.5, 2**80, 1e308, -1e308, "", "\\ud800", None, [], {}, True, [[[]]], 10**400, "x" * 5000]


def places(value, path=()):
    """Yield the paths to all leaves of a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from places(part, (*path, key))
    if not isinstance(value, dict | list):
        yield path


@settings(max_examples=60)
@given(st.data())
def test_a_wrong_value_anywhere_is_refused_or_named_and_never_a_traceback(honest, tmp_path_factory, data):
    store = Store(honest)
    record = data.draw(st.sampled_from(store.load_all()))
    content = json.loads(canonical_json(record))
    path = data.draw(st.sampled_from(sorted(places(content), key=str)))
    old, new = content, data.draw(st.sampled_from(WRONG))
    for key in path[:-1]:
        old = old[key]
    if type(old[path[-1]]) is type(new) and old[path[-1]] == new:
        return
    old[path[-1]] = new
    out = tmp_path_factory.mktemp("wrong")
    (out / "records").mkdir()
    shutil.copy(honest / "ppbench.json", out)
    text = json.dumps(content).replace('"\\\\ud800"', '"\\ud800"')
    (out / "records" / f"{record.cell_id}.json").write_text(text)
    failures = problems(out)  # a traceback fails the test
    named = ("cell_id", "config", "metrics", "artifacts", "status")
    truths = ("kind", "index", "probe", "client", "psnr", "rmse", "ssim", "mse", "blind", "member", "half", "owner")
    assert failures or not (path[0] in named or (path[0] == "victims" and path[-1] in truths)), (path, new)


@pytest.mark.parametrize("text", ['{"a": NaN}', "[" * 100_000, '"\\ud800"', "1" * 5000, '{"cell_id": 1e999}'])
def test_json_that_is_no_record_is_a_sentence(out, text):
    path = sorted((out / "records").glob("*[0-9a-f].json"))[0]
    path.write_text(text)
    assert any(str(path) in problem and "not a whole record" in problem for problem in problems(out))


def test_digests_are_made_again_by_a_forger(out):
    """The forger of this file is competent: without a change, what it writes is sound."""
    forger = Forger(out)
    for record in forger.store.load_all():
        forger.forge(record, lambda d: None)
    forger.tables()
    assert problems(out) == []
    data = (out / "records" / f"{forger.cells()[0].cell_id}.safetensors").read_bytes()
    assert hashlib.sha256(data).hexdigest() == forger.cells()[0].artifacts[0].sha256 and safe.load(data)
