"""Finished trainings and audits land whole; of two processes that make the same, the first one's stays."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from ppbench.base.errors import Unwritable
from ppbench.records.files import publish_folder
from ppbench.run.audit import runs
from ppbench.run.audit.runs import Target
from ppbench.run.train import untrained


def fill(draft: Path) -> None:
    (draft / "figures").write_text("second")


def test_the_first_of_two_writers_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, remove = tmp_path / "made", shutil.rmtree

    def late(path: Path, **options: bool) -> None:  # the other process lands just after the look for a damaged one
        remove(path, **options)
        if path == home:
            home.mkdir()
            (home / "figures").write_text("first")

    monkeypatch.setattr(shutil, "rmtree", late)
    publish_folder(home, ".draft-", fill)
    assert (home / "figures").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_damaged_one_is_replaced_and_a_failure_leaves_nothing(tmp_path: Path) -> None:
    home = tmp_path / "deep" / "made"
    home.mkdir(parents=True)
    (home / "half").touch()
    publish_folder(home, ".draft-", fill)
    assert [path.name for path in home.iterdir()] == ["figures"]

    def full(draft: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(Unwritable, match="No space is left"):
        publish_folder(tmp_path / "other", ".draft-", full)
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]


def test_an_audit_that_another_process_finished_first_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The audit had its own copy of this code, without the branch for two writers."""
    trained = untrained(10, 1, "it diverged").model_copy(update={"diverged": True})
    audit = SimpleNamespace(home=tmp_path, target_folder=tmp_path / "target")
    recorder = SimpleNamespace(federation=SimpleNamespace(save=fill))

    def taken(self: Path, target: Path) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    monkeypatch.setattr(Path, "rename", taken)
    runs._keep(audit, recorder, Target(trained=trained, at_once=1, rounds=()))  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
