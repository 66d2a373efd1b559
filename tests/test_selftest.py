"""The harness's self-test: its networks fall, a planted fault makes them stand, its outcome is in the folder."""

import json

import pytest
import torch

import ppbench.run.evaluation as module
from ppbench.base.errors import UsageError
from ppbench.base.tree import tree_map
from ppbench.claims.check import PAPER_CLAIMS
from ppbench.federation.view import Transcript
from ppbench.records.run_files import SELFTEST, SelftestTrial, Soundness, save_soundness, soundness_of
from ppbench.records.store import Store
from ppbench.report.controls import check_harness
from ppbench.report.page.board import rebuild, up_to_date, write_board
from ppbench.run.evaluation import SUBJECTS, evaluate, selftest
from ppbench.verification import verify


@pytest.fixture
def fault(monkeypatch):
    """Let a fault be planted before the self-test, of which no outcome is kept; return what plants."""
    selftest.cache_clear()
    yield monkeypatch.setattr
    selftest.cache_clear()


def outcome(share=1.0):
    trial = SelftestTrial(model="lenet", attack="dlg", share=share)
    return Soundness(ppbench="0.1.0", code="c0de", torch="2.9", python="3.11", trials=[trial])


def test_the_networks_of_a_sound_harness_fall():
    result = selftest()
    assert {trial.model: trial.share for trial in result.trials} == {subject.model: 1.0 for subject in SUBJECTS}
    check = check_harness(result)
    assert check.control == "harness" and check.ok is True


def test_a_view_that_shows_something_else_is_a_harness_fault(fault):
    real = Transcript.view

    def blurred(self, *args, **options):
        view = real(self, *args, **options)
        for letter in view.mail:
            if letter.receiver == -1:
                tree_map(lambda t: t.copy_(torch.ones_like(t)) if t.is_floating_point() else t, letter.message)
        return view

    fault(Transcript, "view", blurred)
    check = check_harness(selftest())
    assert check.ok is False
    assert check.sentence.startswith("HARNESS FAULT: ") and "lenet" in check.sentence and "mlp" in check.sentence


def test_an_attack_that_crashes_is_a_harness_fault(fault):
    fault(module, "load_plugin", lambda group, name: {}["planted"])
    check = check_harness(selftest())
    assert check.ok is False and "KeyError: 'planted'" in check.sentence


@pytest.fixture
def store(tmp_path, fabricate):
    made = Store(tmp_path / "out")
    for name, db in (("none", 60.0), ("full_noise", 5.0), ("spn", 30.0)):
        made.save(fabricate(name, None, "dlg", "reconstruction", db, adaptive=name == "spn"), seconds=0.0)
    return made


@pytest.mark.parametrize("share", [1.0, 0.0, None])
def test_a_page_is_drawn_without_training(store, share, monkeypatch):
    def trained(*_, **__):
        raise AssertionError("a page was drawn by training")

    monkeypatch.setattr(module, "share_broken", trained)
    monkeypatch.setattr("ppbench.federation.engine.Federation.start", trained)
    if share is not None:
        save_soundness(store.out, outcome(share))
    write_board(store, PAPER_CLAIMS)
    page = store.html_path.read_text()
    assert ("HARNESS FAULT" in page, "Controls hold." in page) == (share == 0.0, share != 0.0)
    assert ("Not known: these records lack the outcome of the harness&#39;s self-test" in page) == (share is None)
    assert ("are rebuilt by an aware attacker" in page) == (share != 0.0), "what is not known withholds no rank"
    assert up_to_date(store, PAPER_CLAIMS) and verify(store.out) == []


def test_an_outcome_that_is_damaged_is_named_and_the_rest_is_shown(store):
    for text in ("{", "[]", json.dumps({"schema": "ppbench.selftest/2"})):
        (store.out / SELFTEST).write_text(text)
        with pytest.raises(UsageError, match=r"selftest\.json holds no outcome of a self-test; delete it"):
            soundness_of(store)
        assert SELFTEST in verify(store.out)[0]
    assert [SELFTEST in problem for problem in rebuild(store, PAPER_CLAIMS).problems] == [True]
    assert not up_to_date(store, PAPER_CLAIMS)


def test_the_outcome_is_written_with_the_cells_and_read_ever_after(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr("ppbench.run.evaluation.selftest", lambda: calls.append(1) or outcome())

    def run():
        return evaluate(
            defense="none", attacks=("label_recovery",), train=40, clients=2, rounds=1, victims=2, batch_size=8,
            attack_batch=(1,), stages=("init",), out=tmp_path / "out", workers=1,
        )  # fmt: skip

    first, store = run(), Store(tmp_path / "out")
    assert soundness_of(store) == outcome() and calls == [1] and first.computed
    assert any(check.control == "harness" and check.ok for check in run().checks) and calls == [1]
    (store.out / SELFTEST).unlink()  # as an older ppbench left it
    assert not run().computed and calls == [1, 1] and soundness_of(store) == outcome()
    save_soundness(store.out, outcome(0.0))
    assert not run().reliable and calls == [1, 1]
