"""Looking before asking: what is left out where the undefended model stands, what never is, and what is said of it."""

import shutil
from collections import Counter

import pytest

from ppbench.questions.base import question_for
from ppbench.report.leak import is_solved, skipped_sentences, undefended_stands
from ppbench.run import jobs, schedule
from ppbench.run.config import configure
from ppbench.run.evaluation import evaluate
from ppbench.run.experiment import resolve
from ppbench.run.group import Bench
from ppbench.run.schedule import count_cells, plan_cells, unfinished

WEAK = {f"adaptive_spn.{name}": 2 for name in ("restarts", "inversion_budget", "joint_budget")}
# Batches of more images than linear systems solve for an adaptive attack: so `none` stands.
TINY = {
    **{"defense": "spn", "grid": (0.1,), "clients": 3, "rounds": 1, "train": 90, "victims": 10, "candidates": 12},
    **{"attack_batch": (5, 6), "budget": 1, "settings": WEAK},
}


class Heard:
    """Progress that keeps what was ready, and how many cells and rounds of training had ended by then."""

    def __init__(self):
        self.left, self.ended, self.trained, self.first = 0, 0, 0, []

    def expect(self, phase, steps):
        self.left += steps if phase == "attacking" else 0

    def advance(self, phase, steps):
        self.left -= steps if phase == "attacking" else 0
        self.trained += steps if phase == "training" else 0

    def cell(self, status, about=""):
        self.ended += 1

    def ready(self, records):
        self.first.append((self.ended, self.trained, list(records)))

    def say(self, line):
        raise AssertionError("digits are read in one way")


@pytest.fixture(scope="module")
def weak(tmp_path_factory):
    """Return an evaluation whose attacks have one evaluation each (four find images again): none stands everywhere."""
    heard = Heard()
    return evaluate(**TINY, out=tmp_path_factory.mktemp("weak") / "out", workers=1, progress=heard), heard


def searched(records):
    """Return by defense the scenes whose inputs were searched."""
    results = {}
    for config in (r.config for r in records if question_for(r).inputs):
        results.setdefault(config.defense.id, set()).add((config.stage, config.batch_size))
    return results


def test_where_none_stands_only_it_and_the_first_answer_are_searched(weak):
    everywhere = {(stage, batch) for stage in ("init", "final") for batch in (5, 6)}
    first = {("init", 5)}
    assert searched(weak[0].records) == {"none": everywhere, "full_noise": first, "spn": first}


def test_labels_and_members_are_asked_everywhere(weak):
    for attack in ("label_recovery", "mia_upload"):
        configs = [r.config for r in weak[0].records if r.config.attack.id == attack]
        assert len({(c.defense.id, c.stage, c.batch_size) for c in configs}) == len(configs) == 3 * 4


def test_what_was_left_out_is_said_and_ends_the_count_of_cells(weak):
    result, heard = weak
    assert heard.left == 0 and result.computed == len(result.records) == heard.ended
    assert [s.split(":")[0] for s in result.left_out] == [
        "Batches of 5 after training", "Batches of 6 after training", "Batches of 6 before training",
    ]  # fmt: skip
    assert all("withstands there too (" in s and " dB)" in s for s in result.left_out)


def test_the_first_answer_comes_once_before_anything_is_trained(weak):
    (ended, trained, records), = weak[1].first  # fmt: skip
    assert ended == trained == 0
    assert {(r.config.stage, r.config.batch_size) for r in records} == {("init", 5)}
    assert {r.config.defense.id for r in records} == {"none", "full_noise", "spn"}
    assert {r.utility.reason for r in records} == {"not trained yet"}


def test_records_are_the_same_whether_their_cells_ran_before_the_training_or_after_it(weak, tmp_path, monkeypatch):
    """A draft becomes the record that its cell gives after the training, byte for byte, without another attack."""
    result, heard = weak
    drafted = {r.cell_id for r in heard.first[0][2]}
    assert not (result.out / "cache" / "drafts").exists()
    copy = shutil.copytree(result.out, tmp_path / "copy")
    for cell in drafted:
        for path in (copy / "records").glob(f"{cell}.*"):
            path.unlink()
    monkeypatch.setattr(schedule.Strand, "_drafts", None)  # trainings are there: none is made
    assert evaluate(**TINY, out=copy, workers=1).computed == len(drafted)
    for cell in drafted:
        for name in (f"{cell}.json", f"{cell}.safetensors"):
            one, other = (out / "records" / name for out in (result.out, copy))
            assert one.exists() == other.exists() and (not one.exists() or one.read_bytes() == other.read_bytes())


def test_a_draft_is_not_attacked_again_and_a_failed_one_is(tmp_path, monkeypatch):
    """Each cell of the first answer is attacked once, unless the attack failed; a run that was killed has drafts."""
    ran, attempts = Counter(), []
    attempt = Bench._run_attack

    def counted(bench, cell, *rest):
        name = cell.attack.name
        ran[bench.group.point, bench.group.stage, name, cell.follows] += 1
        if name == "label_recovery" and not attempts:
            attempts.append(bench.group)
            raise ValueError("once")
        return attempt(bench, cell, *rest)

    monkeypatch.setattr(Bench, "_run_attack", counted)
    options = {**TINY, "attack_batch": (5,), "stages": ("init",)}
    heard = Heard()
    evaluation = evaluate(**options, out=tmp_path / "out", workers=1, progress=heard)
    assert heard.left == 0 and len(heard.first) == 1
    twice = {key for key, count in ran.items() if count > 1}
    assert twice == {(attempts[0].point, "init", "label_recovery", None)}
    assert {r.status for r in evaluation.records} == {"complete"}
    assert all(r.utility.accuracy is not None for r in evaluation.records)


def test_the_same_again_finds_all_there_and_standard_asks_about_every_cell(weak):
    result, _ = weak
    again = evaluate(**TINY, out=result.out, workers=1)
    assert again.computed == 0 and again.left_out == result.left_out
    same = {**TINY, "settings": {**WEAK, "closed_form.largest_batch": 4}}
    plan = plan_cells([resolve(configure(**same, attacks=("standard",)))])
    store = schedule.Store(result.out)
    assert not any(one.gate for one in plan)
    options = {c.id: c for one in plan for c in one.cells}
    assert {r.cell_id for r in result.records} < options.keys()  # a cell is the same cell, whoever asks for it
    left = {c.attack.name for one in unfinished(plan, store) for c in one.cells if c.config.defense.id == "spn"}
    assert {"dlg", "ig", "adaptive_spn", "tracing"} <= left and "label_recovery" not in left


def test_where_none_falls_or_may_have_every_defended_cell_is_asked(weak, monkeypatch):
    plan, store = plan_cells([resolve(configure(**TINY))]), schedule.Store(weak[0].out)
    assert not unfinished(plan, store)
    monkeypatch.setattr(jobs.Gate, "is_closed", lambda gate, records: False)
    left = unfinished(plan, store)
    assert count_cells(left) == sum(len(one.cells) for one in plan if one.gate.undefended) > 0
    assert {c.config.defense.id for one in left for c in one.cells} == {"spn"}


@pytest.mark.nightly
def test_cells_wait_for_those_of_none_and_are_run_where_it_falls(tmp_path, monkeypatch):
    """With attacks that read nothing but labels, and one search, which none is said to fall to."""
    order = []
    monkeypatch.setattr(jobs.Gate, "is_closed", lambda gate, records: order.append((gate, len(records))) or False)
    settings = {**TINY, "attacks": ("quick",), "attack_batch": (2,), "rounds": 1}
    evaluation = evaluate(**settings, out=tmp_path / "out", workers=1)
    gated = [one for one in plan_cells([resolve(configure(**settings))]) if one.gate.undefended]
    assert gated and all(count == len(gate.cells) for gate, count in order if gate.undefended)
    assert {cell.id for one in gated for cell in one.cells} <= {r.cell_id for r in evaluation.records}
    assert not evaluation.left_out


@pytest.fixture(scope="module")
def solved(tmp_path_factory):
    """Return an evaluation of single images, which linear systems solve."""
    options = {**TINY, "attack_batch": (1,), "victims": 2, "stages": ("init",)}
    return evaluate(**options, out=tmp_path_factory.mktemp("solved") / "out", workers=1), options


def test_where_an_exact_attack_solves_every_victim_only_those_who_know_the_defense_search(solved):
    evaluation, _ = solved
    ran = {(r.config.defense.id, r.config.attack.id) for r in evaluation.records if question_for(r).inputs}
    fallen = {(defense, attack) for defense in ("none", "spn") for attack in ("closed_form", "adaptive_server")}
    assert fallen <= ran and ("spn", "adaptive_spn") in ran
    assert ("none", "ig") not in ran and ("spn", "ig") not in ran
    assert ("full_noise", "ig") in ran  # noise is not solved
    assert any(
        "At 2 settings searches unaware of the defense were left out, because every input" in s
        for s in evaluation.left_out
    )
    followed = {(r.config.defense.id, r.config.attack.follows) for r in evaluation.records if r.config.attack.follows}
    assert followed <= ran and followed  # tracing follows what ran


def test_a_solved_setting_stays_solved_and_standard_searches_it(solved):
    evaluation, options = solved
    again = evaluate(**options, out=evaluation.out, workers=1)
    assert again.computed == 0 and again.left_out == evaluation.left_out
    plan, store = plan_cells([resolve(configure(**options, attacks=("standard",)))]), schedule.Store(evaluation.out)
    left = {(c.config.defense.id, c.attack.name) for one in unfinished(plan, store) for c in one.cells}
    assert {("none", "ig"), ("spn", "ig"), ("spn", "dlg")} <= left


def test_one_victim_that_is_not_exact_keeps_the_searches(solved):
    record = next(r for r in solved[0].records if (r.config.defense.id, r.config.attack.id) == ("spn", "closed_form"))
    assert is_solved(record)
    doubtful = record.victims[0].layers[0].model_copy(update={"exact": False})
    first = record.victims[0].model_copy(update={"layers": [doubtful, *record.victims[0].layers[1:]]})
    assert not is_solved(record.model_copy(update={"victims": [first, *record.victims[1:]]}))
    unread = record.victims[0].model_copy(update={"layers": []})
    assert not is_solved(record.model_copy(update={"victims": [unread]}))
    assert not is_solved(record.model_copy(update={"status": "failed"}))


@pytest.mark.parametrize(
    ("decibels", "stays"), [(9.0, True), (15.0, False), (35.0, False)], ids=["blind", "recognizable", "rebuilt"]
)
def test_what_stands_is_not_shown_to_leak(fabricate, decibels, stays):
    record = fabricate("none", None, "ig", "reconstruction", decibels, stage="final")
    assert undefended_stands([record]) is stays
    assert undefended_stands([]) is False  # nothing was looked at: nothing is sure
    assert not undefended_stands([fabricate("none", None, "ig", "reconstruction", status="failed", stage="final")])


def test_of_several_attacks_on_none_the_worst_case_decides(fabricate):
    weak, strong = (
        fabricate("none", None, a, "reconstruction", d, stage="final") for a, d in (("ig", 9.0), ("x", 35.0))
    )
    assert undefended_stands([weak]) and not undefended_stands([weak, strong])


def test_only_what_was_not_searched_is_named(fabricate):
    none = fabricate("none", None, "ig", "reconstruction", 9.0, stage="final")
    label = fabricate("dp", 0.1, "label_recovery", "label", stage="final")
    one, = skipped_sentences("dp", [none, label])  # fmt: skip
    figure = f"({none.metric('psnr_median').value:.1f} dB)"
    assert "after training: dp was not searched" in one and figure in one
    searched_too = fabricate("dp", 0.1, "ig", "reconstruction", 8.0, stage="final")
    assert not skipped_sentences("dp", [none, label, searched_too])
    assert (
        not skipped_sentences("dp", [none])
        and not skipped_sentences("dp", [label])
        and not skipped_sentences("none", [none, label])
    )
    falls = fabricate("none", None, "ig", "reconstruction", 35.0, stage="final")
    assert not skipped_sentences("dp", [falls, label])


def test_the_masked_search_is_for_defenses_that_no_attack_knows():
    """`phong` has no attack of its own, `spn` has one; standard includes it for both."""

    def chosen(defense, attacks):
        return {attack.name for attack in resolve(configure(defense=defense, attacks=(attacks,))).attacks}

    assert "ig_masked" in chosen("phong", "quick") and "ig_masked" not in chosen("spn", "quick")
    assert "ig_masked" in chosen("spn", "standard")
