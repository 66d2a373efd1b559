"""The store: atomic, honest and canonical files, whatever is damaged, full or killed."""

import errno
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from ppbench.base import files
from ppbench.base.errors import Unwritable, UsageError
from ppbench.base.files import publish_folder
from ppbench.questions.membership import MemberScore
from ppbench.records.schema import Record
from ppbench.records.store import MARKER, Store, canonical_json
from ppbench.report.integrity import record_problems

PAIR = {"guess": np.ones((2, 3)), "truth": np.zeros((2, 3))}


@pytest.fixture(scope="session")
def record(fabricate):
    return partial(fabricate, "dp", 0.1, "dlg", "reconstruction", 10.0, control="sigma", n=5)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "out")


def test_a_record_comes_back_as_it_was_and_a_failed_cell_is_not_finished(store, record):
    assert store.ids() == [] and store.load_all() == [] and not store.out.exists(), "looking writes nothing"
    guess = torch.rand(5, 1, 8, 8)
    guess[0] = torch.nan
    kept = store.save(record(), seconds=1.5, tensors={"guess": guess, "truth": torch.rand(5, 1, 8, 8)})
    again = Store(store.out)
    assert again.load_all() == [kept] and again.ids() == [kept.cell_id] and again.finished(kept.cell_id)
    assert np.array_equal(again.images(kept).guess, guess.numpy(), equal_nan=True)
    ends = (".json", ".timing.json", ".safetensors")
    assert {p.name for p in again.folder.iterdir()} == {f"{kept.cell_id}{end}" for end in ends}
    assert json.loads((again.out / MARKER).read_text())["schema"] == "ppbench.results/1"
    failed = store.save(record(seed=7, status="failed"))
    assert store.has(failed.cell_id) and not store.finished(failed.cell_id) and not store.finished("0" * 32)
    assert store.images(failed) is None


def test_records_of_before_load_and_give_the_same_metrics(store, record):
    """A record as 0.1 wrote it: without the later fields, in file and name."""
    kept = store.save(record(blind=None))
    path = store.folder / f"{kept.cell_id}.json"
    data = json.loads(path.read_text())
    later = ("mse", "lpips", "feat_mse", "blind", "oracle", "path")
    data["victims"] = [{k: v for k, v in victim.items() if k not in later} for victim in data["victims"]]
    del data["tuned"]
    path.write_text(json.dumps(data))
    loaded = store.load(kept.cell_id)
    assert loaded == kept and not list(record_problems(loaded))
    member = dict(kind="member", index=0, half=0, member=True, score=1.0, decision=True)
    assert MemberScore.model_validate(member).family == "average"


def test_equal_records_give_equal_bytes(tmp_path, record):
    one, two = Store(tmp_path / "a"), Store(tmp_path / "b")
    kept = one.save(record(), seconds=1.0, tensors=PAIR)
    two.save(record(), seconds=2.0, tensors=dict(reversed(PAIR.items())))
    for end in (".json", ".safetensors"):
        name = f"{kept.cell_id}{end}"
        assert (one.folder / name).read_bytes() == (two.folder / name).read_bytes()
    assert canonical_json(Record.model_validate_json(canonical_json(kept))) == canonical_json(kept)


def test_someone_elses_folder_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(UsageError, match=r"thesis\.tex"):
        Store(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(UsageError, match="is a file"):
        Store(tmp_path / "thesis.tex")


@pytest.mark.parametrize("marker", ["", "[]", "{}", '{"schema": "other/1"}', "\xff"])
def test_a_marker_that_is_not_ours_is_refused(tmp_path, marker):
    (tmp_path / MARKER).write_text(marker, encoding="latin-1")
    with pytest.raises(UsageError):
        Store(tmp_path)


DAMAGES = {
    "truncated": lambda whole: whole[: len(whole) // 2],
    "empty": lambda whole: "",
    "extra field": lambda whole: whole.replace('"cell_id"', '"cell": 1, "cell_id"', 1),
    "text for a number": lambda whole: whole.replace('"batch_size": 1', '"batch_size": "1"'),
    "NaN": lambda whole: whole.replace('"bytes_up": 1000.0', '"bytes_up": NaN'),
    "binary": lambda whole: "\xff\xfe\x00",
}


@pytest.mark.parametrize("damage", [*DAMAGES, "wrong name"])
def test_a_damaged_record_is_reported_by_name(store, record, damage):
    path = store.folder / f"{store.save(record()).cell_id}.json"
    whole = path.read_text()
    if damage == "wrong name":
        path = path.rename(path.with_name("0" * 32 + ".json"))
    else:
        assert DAMAGES[damage](whole) != whole
        path.write_bytes(DAMAGES[damage](whole).encode("latin-1"))
    with pytest.raises(UsageError, match=path.name):
        store.load_all()


def test_a_corrupt_or_missing_artifact_is_reported_by_name(store, record):
    kept = store.save(record(), tensors=PAIR)
    path = store.folder / f"{kept.cell_id}.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(UsageError, match=path.name):
        store.images(kept)
    path.unlink()
    with pytest.raises(UsageError, match=path.name):
        store.images(kept)
    with pytest.raises(ValueError, match="one shape"):
        store.save(record(), tensors={**PAIR, "truth": np.ones((2, 4))})


def test_a_path_in_a_record_is_never_followed(store, record):
    kept = store.save(record(), tensors=PAIR)
    evil = kept.model_copy(update={"artifacts": [kept.artifacts[0].model_copy(update={"path": "../../etc/passwd"})]})
    assert (store.images(evil).truth == 0).all()


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc to tell which file is written")
@pytest.mark.parametrize("failing", [".safetensors", ".timing.json", ".json"])
def test_a_full_disk_is_one_sentence_and_leaves_nothing_of_the_cell(store, record, monkeypatch, failing):
    first, real = store.save(record(seed=7)), os.fsync

    def full(handle):
        name = os.readlink(f"/proc/self/fd/{handle}")
        if failing + "~" in name and (failing != ".json" or ".timing" not in name):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(UsageError, match="No space is left"):
        store.save(record(), seconds=1.0, tensors=PAIR)
    assert [p.name for p in store.folder.iterdir()] == [f"{first.cell_id}.json"]


def test_a_folder_that_cannot_be_written_is_one_sentence(store):
    store.out.mkdir()
    store = Store(store.out)
    store.folder.write_text("")
    with pytest.raises(UsageError, match="is a file, where results have a folder; move it away"):
        store.prepare()


def test_leftovers_of_killed_runs_are_ignored_and_swept_only_if_ours(store, record):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    store.out.mkdir()
    host = files._host()
    (store.out / f"{MARKER}~{host}.{dead.pid}-1.tmp").write_text("{")
    store = Store(store.out)  # killed while it wrote the marker: still an empty folder of ours
    kept, name = store.save(record()), f"{'0' * 32}.json"
    me = f"{os.getpid()}-{files._beginning(os.getpid())}"
    owners = f"~{host}.{me}", f"~other-host.{dead.pid}-1", f"~{host}.{dead.pid}-1"
    *others, mine = [store.folder / name for name in ("notes.tmp", *(f"{name}{owner}.tmp" for owner in owners))]
    for path in (*others, mine):
        path.write_text("{")
    assert store.load_all() == [kept]
    store.sweep()
    assert not mine.exists() and all(path.exists() for path in others)
    assert not list(store.out.glob(f"{MARKER}~*"))


def fill(draft):
    (draft / "figures").write_text("second")


def test_the_first_of_two_writers_stays(tmp_path, monkeypatch):
    home, remove = tmp_path / "made", shutil.rmtree

    def late(path, **options):  # the other process lands just after the look for a damaged one
        remove(path, **options)
        if path == home:
            home.mkdir()
            (home / "figures").write_text("first")

    monkeypatch.setattr(shutil, "rmtree", late)
    publish_folder(home, fill)
    assert (home / "figures").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_damaged_one_is_replaced_and_a_failure_leaves_nothing(tmp_path):
    home = tmp_path / "deep" / "made"
    home.mkdir(parents=True)
    (home / "half").touch()
    publish_folder(home, fill)
    assert [path.name for path in home.iterdir()] == ["figures"]

    def full(draft):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(Unwritable, match="No space is left"):
        publish_folder(tmp_path / "other", full)
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]


def save_and_die(store, record, count):
    """Save a record in a process that ends, without cleaning up, at its `count`-th rename."""
    real, calls = files._sync_folder, iter(range(1, count))
    files._sync_folder = lambda folder: real(folder) if next(calls, None) else os._exit(9)
    try:
        store.save(record, seconds=1.0, tensors=PAIR)
    finally:
        os._exit(1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a child that can be killed anywhere")
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_run_killed_at_any_write_leaves_whole_cells_only(store, record, count):
    child = os.fork()
    if not child:
        save_and_die(store, record(), count)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    store = Store(store.out)
    assert len(store.load_all()) == (count == 4)
    assert store.save(record()).cell_id in store.ids()
