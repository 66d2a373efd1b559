"""The file layer: what is ours is written whole, what is not ours is never touched, and nothing waits for ever."""

import errno
import json
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppbench.attacks.reconstruction import generator as store
from ppbench.base import files
from ppbench.base import files as locks
from ppbench.base.errors import UsageError
from ppbench.base.files import kind_of, locked, sweep_abandoned, temporary_of, write_atomic, write_output
from ppbench.claims.cost_rules import read_figures
from ppbench.metrics.perceptual import weights_file
from ppbench.nets.net import initial, net_spec
from ppbench.records.store import FOLDERS, Store, marker_bytes
from ppbench.run.suite import load_suite
from ppbench.task.user_data import open_dataset

DEAD = f"~{files._host()}.{2**22 + 1}-1.tmp"  # no process has so high a number


def pipe(path):
    os.mkfifo(path)
    return path


def here(path, names):
    """Return what lies below `path`, each with its kind, where it leads and what it holds, but for `names`."""
    results = {}
    for one in sorted(path.rglob("*")):
        if one.name not in names:
            kind = kind_of(one, follow=False)
            kept = os.readlink(one) if kind == "link" else one.read_bytes() if kind == "file" else None
            results[str(one.relative_to(path))] = (kind, kept)
    return results


# -- files that a user names -----------------------------------------------------------------------------------------
def test_an_output_goes_where_its_name_leads_and_links_stay(tmp_path):
    target, link, nothing = tmp_path / "real.xml", tmp_path / "link.xml", tmp_path / "to_come.xml"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to("real.xml")
    write_output(link, b"new")
    assert link.is_symlink() and target.read_bytes() == b"new" and stat.S_IMODE(target.stat().st_mode) == 0o640
    (tmp_path / "dangling").symlink_to(nothing)
    write_output(tmp_path / "dangling", b"made")
    assert (tmp_path / "dangling").is_symlink() and nothing.read_bytes() == b"made"
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]


def test_an_output_is_written_into_a_device_or_a_pipe_and_never_over_it(tmp_path):
    place, got = pipe(tmp_path / "pipe"), []
    reader = threading.Thread(target=lambda: got.append(place.read_bytes()))
    reader.start()
    while True:  # opening it without a reader is refused, see below
        try:
            write_output(place, b"x" * 300_000)
            break
        except UsageError:
            continue
    reader.join(10)
    assert got == [b"x" * 300_000] and kind_of(place) == "special"
    if os.geteuid() == 0:
        node = tmp_path / "null"
        try:
            os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(1, 3))
            write_output(node, b"lost")
        except (PermissionError, UsageError):  # a container may allow neither
            return
        assert stat.S_ISCHR(node.stat().st_mode)


READERS = {
    "suite": lambda path: load_suite(path),
    "figures": lambda path: read_figures([path]),
    "weights": lambda path: weights_file(str(path)),
    "generator": lambda path: store.read_generator(path),
    "a generator's digest": lambda path: store.file_digest(path),
    "table": lambda path: open_dataset(f"csv:{path}", seed=0),
    "backbone": lambda path: configured(path),
}


def configured(path):
    return initial(net_spec("frozen_backbone", (3, 32, 32), 10, {"weights": str(path)}), 0)


@pytest.mark.parametrize("kind", ["folder", "pipe", "loop", "long", "none", "null"])
@pytest.mark.parametrize("reader", READERS)
def test_a_path_that_is_no_file_is_refused_in_a_sentence_by_all_that_read_files(tmp_path, reader, kind):
    """A pipe that nobody writes into would be waited for without an end."""
    end = {"suite": ".toml", "table": ".csv"}.get(reader, ".x")
    path = tmp_path / ({"long": "x" * 300, "null": "a\0b"}.get(kind, "place") + end)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        pipe(path)
    elif kind == "loop":
        path.symlink_to(path)
    with pytest.raises(UsageError) as refused:
        READERS[reader](path)
    assert str(refused.value).endswith(".") and "\n" not in str(refused.value)


def test_what_is_open_already_is_written_on(tmp_path):
    code = (
        "from pathlib import Path\nfrom ppbench.base.files import write_output\n"
        "print('before', flush=True)\nwrite_output(Path('/dev/stdout'), b'the table\\n')\nprint('after', flush=True)"
    )
    out = tmp_path / "out.txt"
    with out.open("ab") as file:
        subprocess.run([sys.executable, "-c", code], stdout=file, check=True)
    assert out.read_text().split("\n")[:3] == ["before", "the table", "after"]


@pytest.mark.parametrize("kind", ["folder", "pipe", "socket", "loop", "long", "null", "below a file"])
def test_an_output_that_cannot_be_is_refused_in_a_sentence_and_at_once(tmp_path, kind):
    path = tmp_path / ("x" * 300 if kind == "long" else "a\0b" if kind == "null" else "place")
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        pipe(path)
    elif kind == "socket":
        import socket

        socket.socket(socket.AF_UNIX).bind(str(path))
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "below a file":
        path.write_text("mine")
        path = path / "inner"
    before = here(tmp_path, ())
    with pytest.raises(UsageError, match=r"^.+ (is a folder; name|cannot be (used|written) \().*\.$"):
        write_output(path, b"new")
    assert here(tmp_path, ()) == before


# -- files inside results --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [Path.mkdir, pipe, lambda p: p.symlink_to(p.parent / "theirs")])
def test_results_are_not_written_over_a_link_a_folder_or_a_pipe(tmp_path, make):
    (tmp_path / "theirs").write_text("theirs")
    make(tmp_path / "record.json")
    before = here(tmp_path, ())
    with pytest.raises(UsageError, match="results are not written over one; move it away"):
        write_atomic(tmp_path / "record.json", b"{}")
    assert here(tmp_path, ()) == before


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("make", [pipe, lambda p: p.write_text("x"), lambda p: p.symlink_to(p.parents[1] / "theirs")])
def test_a_folder_of_results_that_is_a_link_or_no_folder_is_refused(tmp_path, name, make):
    theirs, out = tmp_path / "theirs", tmp_path / "out"
    theirs.mkdir()
    (theirs / "holiday.png").write_bytes(b"a picture")
    out.mkdir()
    (out / "ppbench.json").write_bytes(marker_bytes())
    make(out / name)
    before = here(tmp_path, ())
    with pytest.raises(UsageError, match="is no folder of its own"):
        Store(out)
    assert here(tmp_path, ()) == before


def test_a_folder_of_results_may_be_reached_through_a_link(tmp_path, fabricate):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk")
    record = fabricate("dp", 0.1, "dlg", "reconstruction", 20.0)
    Store(tmp_path / "out").save(record)
    assert Store(tmp_path / "disk").ids() == [record.cell_id]


@pytest.mark.parametrize("make", [pipe, lambda p: p.symlink_to("/etc/hostname")])
def test_a_record_that_is_a_link_or_a_pipe_is_told_and_not_waited_for(tmp_path, fabricate, make):
    store = Store(tmp_path / "out")
    kept = store.save(fabricate("dp", 0.1, "dlg", "reconstruction", 20.0))
    make(store.folder / f"{'0' * 32}.json")
    records, [problem] = Store(store.out).readable()
    assert records == [kept] and "cannot be read" in problem


def test_a_board_removes_its_own_old_figures_alone(tmp_path, fabricate, monkeypatch):
    from ppbench.report.knowing import Knowledge
    from ppbench.report.page import html

    class Drawn:
        label = "label"

        def __init__(self, plot):
            pass

        def png(self):
            return b"label of a picture"

    monkeypatch.setattr(html, "svg_of", lambda plot: f"<svg>{plot}</svg>")
    monkeypatch.setattr(html, "Picture", Drawn)
    monkeypatch.setattr(html, "_named", lambda board, known: [(word, word) for word in board])
    folder = tmp_path / "figures"
    assert [p.name for p in html.write_figures(folder, [("One figure", "Two")], None)] == [
        "one-figure.svg", "one-figure.png", "two.svg", "two.png",
    ]  # fmt: skip
    for name in ("holiday.png", "paper.svg"):
        (folder / name).write_bytes(b"somebody's")
    (folder / "two.png").unlink()
    (folder / "two.png").symlink_to(folder / "holiday.png")
    html.write_figures(folder, [("Three",)], None)
    names = {path.name for path in folder.iterdir()}
    assert names == {"three.svg", "three.png", "holiday.png", "paper.svg", "two.png", "figures.json"}, "a link stays"
    (folder / "figures.json").write_text(json.dumps(["../ppbench.json", "holiday.png", 3]))
    (tmp_path / "ppbench.json").write_text("ours")
    html.write_figures(folder, [("Three",)], None)
    assert (tmp_path / "ppbench.json").exists(), "a list that was changed names nothing elsewhere"
    (folder / "figures.json").write_text("[" * 100_000)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        html.write_figures(folder, [("Four",)], None)
    assert "figures of earlier boards stay" in str(caught[0].message) and (folder / "three.svg").exists()
    assert Knowledge is not None


# -- what killed processes leave -------------------------------------------------------------------------------------
def test_what_a_dead_process_left_goes_and_what_a_living_one_makes_stays(tmp_path):
    store = Store(tmp_path / "out")
    store.prepare()
    mine = temporary_of(store.out / "leaderboard.csv")
    other = store.folder / f"x.json~{files._host()}.{os.getppid()}-{files._beginning(os.getppid())}.tmp"
    reused = store.folder / f"x.json~{files._host()}.{os.getppid()}-1.tmp"
    elsewhere = store.folder / f"x.json~another-machine.{2**22 + 1}-1.tmp"
    training = store.out / "cache" / f"abc{DEAD}"
    inner = store.out / "cache" / "whole" / f"target{DEAD}"
    figure = store.out / "figures" / f"a.png{DEAD}"
    for path in (training, inner):
        path.mkdir(parents=True)
        (path / "state").write_text("half")
    figure.parent.mkdir()
    for path in (mine, other, reused, elsewhere, figure, store.out / f"worst_case.csv{DEAD}"):
        path.write_text("half")
    store.sweep()
    left = {path for path in store.out.rglob("*") if path.name.endswith(".tmp")}
    assert left == {mine, other, elsewhere}


@given(st.text(st.characters(blacklist_characters="/\0", blacklist_categories=("Cs",)), min_size=1, max_size=60))
def test_every_temporary_name_is_known_and_no_other_is(name):
    path = Path("/nowhere") / name
    assert files._TEMPORARY.fullmatch(temporary_of(path).name)
    assert files._TEMPORARY.fullmatch(name) is None or name.endswith(".tmp")


def test_a_folder_that_cannot_be_read_is_a_sentence(tmp_path, monkeypatch):
    def refused(self):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", refused)
    with pytest.raises(UsageError, match=r"cannot be used \(Permission denied\); give another path"):
        sweep_abandoned(tmp_path)


# -- locks -----------------------------------------------------------------------------------------------------------
HOLD = """
import sys, time
from pathlib import Path
from ppbench.base.files import locked
with locked(Path(sys.argv[1]), "testing"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_who_holds_a_lock_is_named_and_a_killed_holder_holds_nothing(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"held\n"
    try:
        with pytest.raises(UsageError, match="is in use by ") as refused, locked(tmp_path, "moving", 0.1):
            pass
        if Path("/proc/locks").exists():
            assert f"process {holder.pid} (" in str(refused.value) and "locked" in str(refused.value)
        assert "wait until it has ended before moving." in str(refused.value)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    with locked(tmp_path, "moving", 0.1):
        assert list(tmp_path.iterdir()) == [], "no file stays behind"


def test_where_there_are_no_locks_a_warning_says_so(tmp_path, monkeypatch):
    import fcntl

    def none(handle, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.warns(UserWarning, match="run one command at a time"), locked(tmp_path, "moving"):
        pass


def _accepts(new, base, number):
    from ppbench.verification.baseline import accept

    accept(Path(new), Path(base), f"reason {number}")


def test_baselines_that_are_accepted_at_once_keep_every_line(accepted, tmp_path):
    base = tmp_path / "base"
    spawn = multiprocessing.get_context("fork")
    made = [spawn.Process(target=_accepts, args=(str(accepted), str(base), number)) for number in range(4)]
    for one in made:
        one.start()
    for one in made:
        one.join(60)
    from ppbench.report.integrity import history

    assert [one.exitcode for one in made] == [0] * 4
    assert sorted(line.reason for line in history(base)) == [f"reason {number}" for number in range(4)]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("base")] == ["base"]


@pytest.mark.parametrize("killed_at", [1, 2])
def test_a_move_that_is_killed_between_its_renames_loses_nothing(accepted, tmp_path, monkeypatch, killed_at):
    from ppbench.report.integrity import history
    from ppbench.verification.baseline import accept

    base = tmp_path / "base"
    accept(accepted, base, "first")
    child = os.fork()
    if not child:
        real, count = Path.rename, iter(range(1, 9))

        def rename(self, to):
            if self.name.startswith("base") and next(count) == killed_at:
                os._exit(9)
            return real(self, to)

        Path.rename = rename
        try:
            accept(accepted, base, "lost")
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert base.exists() is (killed_at == 1)
    accept(accepted, base, "second")
    assert [line.reason for line in history(base)] == ["first", "second"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("base")] == ["base"]


@pytest.fixture
def accepted(fabricate, pictured, tmp_path, monkeypatch):
    """Return a finished run that may be accepted; boards are an empty table, to be quick."""
    from ppbench.verification import baseline as module

    def board(store, claims):
        with locks.locked(store.out, "writing its board"):
            store.html_path.write_text("a page")
        return []

    monkeypatch.setattr(module, "write_board", board)
    store = Store(tmp_path / "new")
    for defense, value, figure in (("none", None, 30.0), ("full_noise", None, 5.0), ("dp", 0.1, 12.0)):
        record = fabricate(defense, value, "dlg", "reconstruction", figure, control="sigma")
        record, tensors = pictured(record.model_copy(update={"asked": "q"}))
        store.save(record, seconds=1.0, tensors=tensors)
    return store.out
