"""Results in one file: equal bytes there and back, and nothing that a stranger's file could do."""

import hashlib
import importlib
import io
import stat
import struct
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from ppbench.base.errors import UsageError
from ppbench.cli import app
from ppbench.records import archive as module
from ppbench.records.archive import MEMBER, Archive, pack, unpack
from ppbench.records.soundness import Soundness, Trial, save_soundness, soundness_of
from ppbench.records.store import Store, marker_bytes
from ppbench.records.times import ClientTime, save_time, time_of, training_of
from ppbench.report.accepted import history, records_digest
from ppbench.report.baseline import accept
from ppbench.report.compare.outcome import compare
from ppbench.report.verify import verify
from ppbench.run import recheck

tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
BOARDS = sorted((Path(__file__).parents[1] / "leaderboards" / "results").glob("*/manifest.toml"))
TIME = ClientTime(
    ratio=1.5, low=1.4, high=1.6, pairs=9, seconds=0.3, undefended_seconds=0.2, machine="x86_64", threads=1
)


@pytest.fixture
def store(tmp_path, fabricate, pictured):
    """Results with everything that a folder can hold, and things that do not travel."""
    made = Store(tmp_path / "out")
    for name, value, db in (("none", None, 60.0), ("full_noise", None, 5.0), ("dp", 0.1, 12.0), ("dp", 0.2, 9.0)):
        record, images = pictured(fabricate(name, value, "dlg", "reconstruction", db, control="sigma"))
        made.save(record, seconds=0.5, tensors=images)
    save_time(made.out, training_of(record), TIME)
    trial = Trial(model="lenet", attack="dlg", share=1.0)
    save_soundness(made.out, Soundness(ppbench="0.1.0", code="c0de", torch="2", python="3", trials=[trial]))
    (made.out / "cache").mkdir()
    (made.out / "cache" / "model.safetensors").write_bytes(b"0")
    (made.out / "leaderboard.html").write_text("a page")
    (made.out / "notes.txt").write_text("mine")
    return made


@pytest.fixture
def packed(store, tmp_path):
    assert pack(store.out, tmp_path / "out.zip") == ["cache/", "leaderboard.html", "notes.txt"]
    return tmp_path / "out.zip"


def contents(folder):
    files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    return {name: data for name, data in files.items() if MEMBER.fullmatch(name)}


def test_there_and_back_byte_for_byte(store, packed, tmp_path):
    assert unpack(packed, tmp_path / "back") == []
    assert contents(tmp_path / "back") == contents(store.out) and len(contents(store.out)) == 4 * 3 + 3
    pack(tmp_path / "back", tmp_path / "again.zip")
    assert (tmp_path / "again.zip").read_bytes() == packed.read_bytes(), "equal files, equal bytes"
    with zipfile.ZipFile(packed) as other:  # any other tool reads it
        assert other.testzip() is None and {n: other.read(n) for n in other.namelist()} == contents(store.out)


def test_what_reads_a_folder_reads_its_archive_which_is_accepted_and_is_no_target(store, packed, tmp_path):
    read = Store(packed)
    assert read.ids() == store.ids() and read.load_all() == store.load_all() and read.has(store.ids()[0])
    one, other = (some.images(some.load_all()[0]) for some in (read, store))
    assert one is not None and other is not None and np.array_equal(one.guess, other.guess)
    assert soundness_of(read) == soundness_of(store) and not Archive(packed).holds("notes.txt")
    assert verify(packed) == verify(store.out) == []
    with pytest.raises(UsageError, match="is an archive, which can only be read"):
        read.prepare()
    line = accept(packed, tmp_path / "base", "from a colleague")
    assert line.digest == records_digest(store.load_all()) and soundness_of(Store(tmp_path / "base"))
    pack(tmp_path / "base", tmp_path / "base.zip")
    assert verify(tmp_path / "base.zip") == [] and history(tmp_path / "base.zip") == [line]
    with pytest.raises(UsageError, match="is an archive; a baseline that moves is a folder"):
        accept(packed, tmp_path / "base.zip", "again")


def test_the_commands_take_an_archive(store, tmp_path, monkeypatch):
    def run(*words):
        found = CliRunner().invoke(app, [str(word) for word in words])
        assert found.exception is None or isinstance(found.exception, SystemExit | UsageError), found.exception
        return found.exit_code, str(found.exception or "") + found.output

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recheck, "recheck", lambda *_: recheck.Findings((), ()))  # these records are of no data
    code, told = run("pack", "out")
    assert code == 0 and "out.zip" in told and "left out: cache/, leaderboard.html, notes.txt" in told
    assert "is there already" in run("pack", "out")[1] and "holds no records" in run("pack", "out.zip")[1]
    assert run("verify", "out.zip")[0] == 0 and "is no folder" in run("verify", "nowhere.zip")[1]
    assert compare(Path("out.zip"), store.out).exit_code == compare(store.out, Path("out.zip")).exit_code
    assert "4 records of ppbench" in run("claims", "out.zip")[1]
    assert "--out FOLDER is where" in run("leaderboard", "out.zip")[1]
    code, told = run("leaderboard", "out.zip", "--out", "drawn")
    assert code == 0 and Path("drawn/leaderboard.html").is_file() and verify(Path("drawn")) == []
    tables = [f"drawn/{name}" for name in ("leaderboard.html", "leaderboard.csv", "worst_case.csv")]
    figures = [path for path in Path("drawn/figures").iterdir() if path.suffix in {".svg", ".png"}]
    assert told.splitlines() == [*tables, f"{len(figures)} figures in drawn/figures"] and figures
    last = store.load_all()[-1]
    assert time_of(Path("drawn"), last) == time_of(store.out, last)
    assert "not empty" in run("leaderboard", "out.zip", "--out", "drawn")[1]


@pytest.mark.parametrize("end", [".json", ".safetensors", ".timing.json"])
def test_a_flipped_byte_costs_its_member_alone(store, packed, tmp_path, end):
    cell = store.ids()[1]
    with zipfile.ZipFile(packed) as opened:
        member = opened.getinfo(f"records/{cell}{end}")
    data = bytearray(packed.read_bytes())
    data[member.header_offset + 30 + len(member.filename) + member.compress_size // 2] ^= 0x10  # amid its packed bytes
    packed.write_bytes(data)
    problems = verify(packed)
    assert len(problems) == 1 and f"{cell}{end}" in problems[0] and "damaged" in problems[0]
    records, unread = Store(packed).readable()
    assert len(records) == (3 if end == ".json" else 4) and len(unread) == (end == ".json")
    damaged = unpack(packed, tmp_path / "back")
    assert len(damaged) == 1 and f"{cell}{end}" in damaged[0]
    assert len(contents(tmp_path / "back")) == len(contents(store.out)) - 1
    found = CliRunner().invoke(app, ["leaderboard", str(packed), "--out", str(tmp_path / "drawn")])
    assert found.exit_code == 1 and f"{cell}{end}" in found.output and (tmp_path / "drawn/leaderboard.csv").is_file()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_archive_is_refused_in_a_sentence(packed, share):
    data = packed.read_bytes()
    packed.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(UsageError, match="is a file and no whole archive"):
        Store(packed)


def zipped(path, *members, mode=stat.S_IFREG, flags=0, method=8):
    """Write a zip as anyone could, the marker first."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as made:
        for name, data in (("ppbench.json", marker_bytes()), *members):
            member = zipfile.ZipInfo("x")
            member.filename, member.external_attr, member.compress_type = name, mode << 16, method
            made.writestr(member, data)
        for member in made.filelist:
            member.flag_bits |= flags
    path.write_bytes(out.getvalue())
    return path


CELL = "a" * 32
BAD = (
    *("../evil.json", "records/../../evil", "/etc/passwd", "C:/evil.json", "C:\\evil.json", "..\\evil", "records\\x"),
    *("records/", "records/mine.json", "figures/x.svg", "leaderboard.html", "records//a", "", ".", "PPBENCH.JSON"),
    *(f"records/{'A' * 32}.json", f"records/{CELL}.json/x", f"records/{CELL}.json\n", f"./times/{CELL}.json"),
    f"records/{CELL}.json\0/../../evil",
)


@pytest.mark.parametrize("name", BAD)
def test_a_name_that_is_none_of_ours_is_refused(tmp_path, name):
    path = zipped(tmp_path / "a.zip", (name, b"{}"))
    for read in (Store, lambda path: unpack(path, tmp_path / "deep" / "back")):
        with pytest.raises(UsageError, match=r"its member .* is no file of results|no whole archive"):
            read(path)
    assert [p.name for p in tmp_path.iterdir()] == ["a.zip"]


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_no_name_leads_out_of_the_folder(name):
    """What is accepted is made of a few letters, has no empty part and no part of dots; two never differ by case."""
    for tried in (name, f"records/{name}", f"times/{name}.json", f"records/{'a' * 32}{name}"):
        if MEMBER.fullmatch(tried):
            assert all(part.strip(".") and part == part.lower() for part in tried.split("/"))
            assert not Path(tried).is_absolute() and set(tried) <= set("abcdefghijklmnopqrstuvwxyz0123456789_./")


TWICE = (("sources.json", b"[]"), ("sources.json", b"{}"))


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("members", "about", "why"),
    [
        ((), dict(mode=stat.S_IFLNK), "is a link"),
        ((), dict(mode=stat.S_IFIFO), "is a link or a device"),
        ((), dict(flags=1), "is encrypted"),
        ((), dict(method=zipfile.ZIP_BZIP2), "packed by a method"),
        (TWICE, {}, "is there twice"),
    ],
)
def test_links_ciphers_other_methods_and_doubles_are_refused(tmp_path, members, about, why):
    with pytest.raises(UsageError, match=why):
        Store(zipped(tmp_path / "a.zip", *members, **about))


def test_an_archive_that_unfolds_to_too_much_is_refused(tmp_path, monkeypatch):
    bomb = zipped(tmp_path / "bomb.zip", ("sources.json", bytes(module.FREE_BYTES)))
    with pytest.raises(UsageError, match="would unfold to 2 files of"):
        Store(bomb)
    monkeypatch.setattr(module, "MEMBER_BYTES", 1 << 20)
    with pytest.raises(UsageError, match=r"'sources.json' would unfold to \d+ bytes"):
        Store(bomb)
    monkeypatch.setattr(module, "MEMBERS", 2)
    with pytest.raises(UsageError, match="would unfold to 3 files"):
        Store(zipped(tmp_path / "many.zip", ("sources.json", b""), ("accepted.jsonl", b"")))


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
def test_a_member_that_lies_about_its_size_is_unfolded_no_further(tmp_path, monkeypatch, method):
    path = zipped(tmp_path / "a.zip", ("sources.json", bytes(1 << 24)), method=method)
    data, place = path.read_bytes(), path.read_bytes().rindex(b"sources.json") - 46
    path.write_bytes(data[: place + 24] + struct.pack("<I", 100) + data[place + 28 :])  # the size in the directory
    lengths, real = [], module._unfolded
    monkeypatch.setattr(module, "_unfolded", lambda *a: lengths.append(len(got := real(*a))) or got)
    with pytest.raises(OSError, match="damaged: not the bytes that were packed"):
        Archive(path).read("sources.json")
    assert lengths == [101]


@pytest.mark.parametrize("manifest", BOARDS, ids=[path.parent.name for path in BOARDS])
def test_every_committed_board_is_what_its_manifest_says(manifest):
    """The digest of the records is the one under which `ppbench baseline accept` verified all of them."""
    about, folder = tomllib.loads(manifest.read_text()), manifest.parent
    path = folder / ("records.zip" if "archive_sha256" in about else "baseline")
    if path.is_file():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == about["archive_sha256"]
        assert Archive(path).read("worst_case.csv") == (folder / "worst_case.csv").read_bytes()
    store = Store(path)
    records = store.load_all()
    assert records_digest(records) == about["records_digest"] == history(path)[-1].digest
    assert len(records) == about["cells"] and soundness_of(store) is not None
    assert {(r.environment.ppbench, r.environment.torch, r.environment.python) for r in records} == {
        (about["ppbench"], about["torch"], about["python"])
    }


@pytest.mark.skipif(not BOARDS, reason="the committed boards are not here")
def test_the_committed_boards_are_small_and_one_is_verified_and_drawn(tmp_path):
    folder = Path(__file__).parents[1] / "leaderboards" / "results"
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert size <= 20_000_000, "three seeds of every board, reconstructions left out"
    path = folder / "bank-marketing-two-cores" / "records.zip"
    found = CliRunner().invoke(app, ["leaderboard", str(path), "--out", str(tmp_path / "drawn")])
    assert found.exit_code == 0 and verify(path) == [] and verify(tmp_path / "drawn") == [], found.output
    assert (tmp_path / "drawn" / "worst_case.csv").read_bytes() == (path.parent / "worst_case.csv").read_bytes()
    assert "Controls hold." in (tmp_path / "drawn" / "leaderboard.html").read_text()
