"""Forgeries by who knows the format: names, digests, aggregates, flags and tables are made again after each."""

import hashlib
import json
import re
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from daily import all_but_nightly, every_third
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import numpy as safe

import ppbench
from ppbench.base.errors import UsageError
from ppbench.base.tensor_files import seal, unsealed
from ppbench.metrics.image import PSNR_CAP
from ppbench.metrics.intervals import clopper_pearson
from ppbench.metrics.modality import IMAGE
from ppbench.questions.base import question_of
from ppbench.questions.image_metrics import score_figures
from ppbench.questions.images import blind_decibels, flags_of, inexact
from ppbench.questions.reconstruction import RECOMPUTED
from ppbench.records.figure import aggregate
from ppbench.records.run_files import training_of
from ppbench.records.schema import Control, Record
from ppbench.records.store import Store, canonical_json
from ppbench.report.compare.outcome import compare
from ppbench.report.page.boards import boards_of, csv_text, no_claims, worst_csv
from ppbench.run.sweep import missing_cells
from ppbench.run.train import TRAINED_FILE
from ppbench.verification import examine
from ppbench.verification import recheck as rechecking
from ppbench.verification.recheck import full_findings, recheck

ASKED = dict(
    defense="dp_sgd", grid=(1.0, 2.0), rounds=1, clients=2, train=120, victims=4, attack_batch=(2,), candidates=10,
    attacks=("analytic", "ig", "dlg", "label_recovery", "tracing", "mia_loss"), stages=("init", "final"), workers=1,
    settings={"ig.budget": 20, "dlg.budget": 20}, model="mlp", tuning=0,
)  # fmt: skip


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
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
        self.forge_all([record], change, images)

    def forge_all(self, records, change, images=None):
        """Write records after `change` in the place of the old ones, of which some may then have others' names."""
        kept = [self.store.images(record) for record in records]
        for record in records:
            self.remove(record)
        for record, pair in zip(records, kept, strict=True):
            data = json.loads(canonical_json(record))
            change(data)
            tensors = None if pair is None else {"guess": pair.guess, "truth": pair.truth, "blind": pair.blind}
            if images is not None:
                images(tensors)
            self.store.save(remade(data), seconds=1.0, tensors=tensors)

    def remove(self, record):
        for path in (self.out / "records").glob(f"{record.cell_id}.*"):
            path.unlink()

    def tables(self):
        for path in (self.out / "leaderboard.csv", self.out / "worst_case.csv"):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.out / "cache", ignore_errors=True)  # it does not travel
        records = self.store.load_all()
        ranked = boards_of(records, no_claims)
        self.store.csv_path.write_text(csv_text(records, boards=ranked))
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


def test_what_nobody_touched_is_sound_and_first_says_in_numbers_what_was_not_checked(honest):
    result = full_findings(honest)
    assert result.problems == () and "the page" in result.checked
    first, *_, last = str(result).split("\n")
    cells = len(Store(honest).ids())
    assert first.startswith("Not checked: ") and f"in {cells} of {cells} cells" in first and len(result.unchecked) > 7
    assert all(re.search(r"\b\d+ (of|are)\b", clause) for clause in result.unchecked), "each clause counts"
    assert last.startswith(f"What was checked agrees: {cells} records, ") and "every" not in str(result).lower()


BESIDE = [probe_epsilon_in_all, swapped, "owners", "victims dropped", "cost lowered"]
"""Left to the night: others of the same sentence are asked daily."""


@pytest.mark.parametrize(
    "forgery", all_but_nightly([*ACTS, *CHANGES], BESIDE), ids=lambda forgery: getattr(forgery, "__name__", forgery)
)
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


# -- 24 more: each is named, or counted at the top as not checked ------------------------------------------------------
def relabelled(change, only=lambda record: True):
    """Return a forgery that changes all such cells."""

    def act(forger):
        forger.forge_all(list(filter(only, forger.store.load_all())), change)
        forger.tables()

    return act


def sigma(data):
    return data["config"]["defense"]["control"]["value"]


def scene(data):
    return data["config"]["stage"], data["config"]["attack"]["kind"], data["config"]["batch_size"]


def values_swapped(forger):
    """Swap the two control values, with the guarantees, so that all that follows from the configuration agrees."""
    records = [r for r in forger.store.load_all() if r.config.defense.control is not None]
    privacy = {}
    for record in records:
        data = json.loads(canonical_json(record))
        privacy[(sigma(data), *scene(data))] = data["privacy"]

    def change(data):
        value = 3.0 - sigma(data)
        data["privacy"] = privacy[(value, *scene(data))]
        control = data["config"]["defense"]["control"]
        control["value"] = data["config"]["defense"]["parameters"][control["name"]] = value

    forger.forge_all(records, change)
    forger.tables()


def at_truth_nil(forger):
    forger.forge_all(forger.cells(), lambda d: [v.update(at_truth=0.0) for v in d["victims"]])
    forger.tables()


def flagged(forger):
    flag = {"code": "own_account", "severity": "warning", "detail": "x"}
    cell = next(r for r in forger.cells() if r.config.stage == "init")  # uploads of trained weights are not made again
    forger.forge(cell, lambda d: d["flags"].append(flag))
    forger.tables()


def rounds_relabelled(data):
    data["config"]["federation"]["rounds"] = 2
    data["utility"]["curve"] = [[2, data["utility"]["curve"][-1][1]]]


def prefix(data):
    data["config"]["victims"] = 2
    data["victims"], data["asked"] = data["victims"][:2], None


def shorter(tensors):
    tensors.update(guess=tensors["guess"][:2], truth=tensors["truth"][:2])


def prefix_of_victims(defended):
    def act(forger):
        images = [r for r in forger.store.load_all() if question_of(r.config.attack.kind).inputs]
        forger.forge_all([r for r in images if r.config.defense.id == "dp_sgd" or not defended], prefix, shorter)
        forger.tables()

    return act


def without(name):
    def act(forger):
        for record in forger.store.load_all():
            if record.config.defense.id == name:
                forger.remove(record)
        forger.tables()

    return act


def removed(*names):
    return lambda forger: [(forger.out / name).unlink() for name in names]


def edited(name, old, new):
    def act(forger):
        path = next(iter(sorted(forger.out.glob(name))))
        text = path.read_text()
        assert old in text, text[:500]
        path.write_text(text.replace(old, new, 1))

    return act


def cells_of_an_attack_removed(forger):
    for record in forger.cells():
        if record.config.attack.id == "ig":
            forger.remove(record)
    forger.tables()


def swapped_inside(forger):
    def change(data):
        a, b = data["victims"][:2]
        data["victims"][:2] = [{**b, "index": a["index"], "probe": a["probe"], "client": a["client"]},
                               {**a, "index": b["index"], "probe": b["probe"], "client": b["client"]}]  # fmt: skip

    forger.forge(next(r for r in forger.cells() if r.victims[0].psnr != r.victims[1].psnr), change)
    forger.tables()


def model_and_cache(forger):
    """Forge the accuracy of a training in all its cells and in the cache, with its digests."""
    records = [r for r in forger.store.load_all() if r.config.defense.id == "none"]
    forger.forge_all(records, perfect)
    home = forger.out / "cache" / training_of(records[0])
    about = unsealed(home / TRAINED_FILE)
    perfect(about)
    (home / TRAINED_FILE).unlink()
    seal(home, TRAINED_FILE, about)


def newer_schema(forger):
    for path in list(forger.store.folder.glob("*[0-9a-f].json"))[:1]:
        path.write_text(path.read_text().replace("ppbench.run/1", "ppbench.run/2"))


def unsure(forger):
    record = forger.cells()[0]
    data = json.loads(canonical_json(record))
    data["metrics"][0]["low"] = 0.0
    (forger.store.folder / f"{record.cell_id}.json").write_text(json.dumps(data))


def budget(name):
    return relabelled(
        lambda d: d["config"]["attack"]["parameters"].update(budget=1800),
        lambda r: (r.config.attack.id, r.config.defense.id) == (name, "dp_sgd"),
    )


MORE = {
    "at_truth set to 0": (at_truth_nil, "its upload made again gives"),
    "control values swapped": (values_swapped, "its upload made again gives"),
    "a flag of evidence": (flagged, "flag own_account is there, which its upload made again does not raise"),
    "budget of a descent": (budget("ig"), "a descent spends its 1800"),
    "budget of a search": (budget("dlg"), "its budget is 1800"),
    "rounds relabelled": (relabelled(rounds_relabelled), "utility.curve is at rounds [2]"),
    "a prefix of defended victims": (prefix_of_victims(True), "the control none has no cell beside"),
    "a prefix of all victims": (prefix_of_victims(False), "whether all cells of evaluate/1 are there, of which"),
    "none removed": (without("none"), "the control none has no cell beside"),
    "noise removed": (without("full_noise"), "the control full_noise has no cell beside"),
    "tables removed": (removed("leaderboard.csv", "worst_case.csv"), "rows in 2 of 2 tables"),
    "an attack removed": (cells_of_an_attack_removed, "whether all cells of evaluate/1 are there, of which"),
    "table edited": (edited("leaderboard.csv", ",dp_sgd,", ",dp_sge,"), "leaderboard.csv line"),
    "worst case edited": (edited("worst_case.csv", ",dp_sgd,", ",dp_sge,"), "worst_case.csv line"),
    "scores swapped": (swapped_inside, "its images give"),
    "a wider interval": (unsure, "the scores give"),
    "times": (edited("records/*.timing.json", '"seconds": ', '"seconds": 9'), "times in"),
    "self-test": (edited("selftest.json", '"share": 1.0', '"share": 0.9'), "the self-test in 1 of 1 folders"),
    "where it ran": (relabelled(lambda d: d["environment"].update(apart="in a box")), "where and when it ran in"),
    "what an attack reports": (relabelled(lambda d: [v.update(confidence=0.5) for v in d["victims"] if "psnr" in v]),
                               "confidence, oracle, path and layers are what attacks answered in"),
    "model and cache": (model_and_cache, "the model in cache/ measured again at"),
    "a threat model of nobody's": (
        relabelled(lambda d: d["config"]["threat_model"].update(id="spy/1"), lambda r: r.config.attack.id == "ig"),
        "threat models that are not ours",
    ),
    "newer schema": (newer_schema, "'ppbench.run/2'"),
    "origin": (edited("origin.json", '"command": "', '"command": "other '), "where and when it ran in"),
}  # fmt: skip


@pytest.mark.parametrize("what", every_third(MORE))
def test_each_of_these_is_named_or_counted_at_the_top(out, what):
    act, words = MORE[what]
    act(Forger(out))
    result = examine(out, None, recheck)
    first = str(result).split("\n")[0]
    assert any(words in problem for problem in result.problems) or words in first, (first, result.problems[:5])


@pytest.fixture(scope="module")
def page(honest):
    return (honest / "leaderboard.html").read_text()


EDITS = {
    "a figure": ("<td>", "<td>0", "leaderboard.html has "),
    "a script": ("</body>", "<script>alert()</script></body>", "leaderboard.html has "),
    "a drawing more": ("</body>", "<svg>nothing leaks</svg></body>", "leaderboard.html has "),
    "a picture": ("data:image/png;base64,", "data:image/png;base64,A", "leaderboard.html has "),
    "a line of a drawing": ("<path ", "<path x='' ", "lines in 1 of "),
}


@pytest.mark.parametrize("what", every_third(EDITS))
def test_an_edited_page_is_named(out, page, monkeypatch, what):
    """It is drawn once, by the evaluation; that it is drawn alike again, another test says."""
    monkeypatch.setattr(rechecking, "page_of", lambda *_: SimpleNamespace(html=lambda: page))
    old, new, words = EDITS[what]
    (out / "leaderboard.html").write_text(page.replace(old, new, 1))
    result = full_findings(out)
    assert any(
        words in clause
        for clause in (result.unchecked if "drawing" in what and "more" not in what else result.problems)
    )


def test_a_page_that_is_missing_is_counted_at_the_top(out):
    (out / "leaderboard.html").unlink()
    assert any("leaderboard.html is not here" in clause for clause in full_findings(out).unchecked)


def test_cells_that_a_suite_does_not_ask_for_are_named(quick):
    one = next(r for r in quick if r.config.defense.id == "dp" and r.config.attack.id == "ig")
    about, attack = one.config.defense, one.config.attack
    at = {"control": Control(name="sigma", value=0.7), "parameters": {**about.parameters, "sigma": 0.7}}
    changes = (
        {"defense": about.model_copy(update=at)},
        {"victims": 6},
        {"attack": attack.model_copy(update={"parameters": {**attack.parameters, "budget": 900}})},
    )
    older = {"attack": attack.model_copy(update={"version": "0"})}  # no problem, and not among those that are counted
    other = [one.model_copy(update={"config": one.config.model_copy(update=c)}) for c in (*changes, older)]
    owner = next(r for r in quick if r.config.attack.follows == "ig")  # of an older `ig`: no problem either
    followed = owner.config.attack.model_copy(
        update={"parameters": {**owner.config.attack.parameters, "ig.version": "0"}}
    )
    other.append(owner.model_copy(update={"config": owner.config.model_copy(update={"attack": followed})}))
    extra, *rest = sorted(missing_cells([*quick, *other]), key=lambda sentence: not sentence[1])
    assert extra[1] and extra[0].startswith("3 cells are not as suite digits-quick/1 asks for them"), extra
    assert not any(problem for _, problem in rest)


@pytest.mark.nightly
def test_cells_behind_a_closed_gate_are_not_missing_and_others_are():
    """The board of letters has several networks and the quick portfolio, which searches only what may come out."""
    records = Store(Path(__file__).parents[1] / "leaderboards" / "results" / "text" / "records.zip").load_all()
    assert not [sentence for sentence, problem in missing_cells(records) if problem]
    adapters = next(r for r in records if r.config.model.options.get("lora") == 4 and r.config.defense.id == "none")
    lacks = [sentence for sentence, problem in missing_cells([r for r in records if r is not adapters]) if problem]
    assert len(lacks) == 1 and lacks[0].startswith("1 of the"), lacks


def test_a_parameter_that_came_since_is_as_asked_at_its_default_and_not_elsewhere(quick):
    def without(name):
        some = []
        for record in quick:
            attack = record.config.attack
            if attack.id == "adaptive_server":
                left = {key: value for key, value in attack.parameters.items() if key != name}
                assert len(left) < len(attack.parameters)
                config = record.config.model_copy(update={"attack": attack.model_copy(update={"parameters": left})})
                record = record.model_copy(update={"config": config})
            some.append(record)
        return [words for words, problem in missing_cells(some) if problem]

    assert without("slots") == [], "the suite leaves it at its default"
    assert any("are not as suite" in words for words in without("restarts")), "the suite sets 0, the default is 2"


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


@pytest.mark.parametrize(
    "text", every_third(['{"a": NaN}', '"\\ud800"', "1" * 5000, "[" * 100_000, '{"cell_id": 1e999}'])
)
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
