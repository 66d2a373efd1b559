"""The harness's own canaries: they fall, and a fault planted in the harness makes them stand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import ppbench.run.selftest as canaries
from ppbench.base.tree import tree_map
from ppbench.federation.view import Transcript
from ppbench.records.schema import Record
from ppbench.records.store import Store
from ppbench.report.page.board import write_board
from ppbench.run.selftest import CANARIES, harness_check, share_broken


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    harness_check.cache_clear()
    yield
    harness_check.cache_clear()


@pytest.mark.parametrize("canary", CANARIES, ids=[c.model for c in CANARIES])
def test_canaries_fall(canary: canaries.Canary) -> None:
    assert share_broken(canary) == 1.0


def test_a_sound_harness_says_so() -> None:
    check = harness_check()
    assert check.control == "harness" and check.ok is True


def test_a_view_that_shows_something_else_is_a_harness_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Transcript.view

    def blurred(self: Transcript, *args: object, **options: object) -> object:
        view = real(self, *args, **options)
        for letter in view.mail:
            if letter.receiver == -1:
                tree_map(lambda t: t.copy_(torch.ones_like(t)) if t.is_floating_point() else t, letter.message)
        return view

    monkeypatch.setattr(Transcript, "view", blurred)
    check = harness_check()
    assert check.ok is False
    assert check.sentence.startswith("HARNESS FAULT: ") and "lenet" in check.sentence and "mlp" in check.sentence


def test_an_attack_that_crashes_is_a_harness_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(group: str, name: str) -> object:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(canaries, "load", broken)
    check = harness_check()
    assert check.ok is False and "ZeroDivisionError: planted" in check.sentence


def test_a_harness_fault_stands_on_the_page_and_nothing_is_ranked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fabricate: Callable[..., Record]
) -> None:
    store = Store(tmp_path / "out")
    store.prepare()
    for name, db in (("none", 60.0), ("full_noise", 5.0), ("spn", 30.0)):
        store.save(fabricate(name, None, "dlg", "reconstruction", db, adaptive=name == "spn"), seconds=0.0)
    write_board(store)
    assert "HARNESS FAULT" not in store.html_path.read_text() and "Controls hold." in store.html_path.read_text()
    monkeypatch.setattr(canaries, "load", lambda group, name: 1 / 0)
    harness_check.cache_clear()
    write_board(store)
    page = store.html_path.read_text()
    assert "HARNESS FAULT" in page and "Controls hold." not in page and "does not hide pixels" not in page
