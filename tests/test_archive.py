"""Results in one file: equal bytes there and back, and nothing that somebody else's file could do."""

import hashlib
import importlib
import io
import stat
import struct
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from daily import all_but_nightly, boards
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from ppbench.base.errors import UsageError
from ppbench.commands import app
from ppbench.records import archive as groups
from ppbench.records import archive as module
from ppbench.records.archive import MEMBER, Archive, pack_archive, unpack_archive
from ppbench.records.run_files import (
    ClientTime,
    SelftestTrial,
    Soundness,
    save_soundness,
    save_time,
    soundness_of,
    time_of,
    training_of,
)
from ppbench.records.store import Store, marker_bytes
from ppbench.report.compare.outcome import compare
from ppbench.report.integrity import history, records_digest
from ppbench.verification import recheck, verify
from ppbench.verification.baseline import accept

DRAWN = True

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
    trial = SelftestTrial(model="lenet", attack="dlg", share=1.0)
    save_soundness(made.out, Soundness(ppbench="0.1.0", code="c0de", torch="2", python="3", trials=[trial]))
    (made.out / "cache").mkdir()
    (made.out / "cache" / "model.safetensors").write_bytes(b"0")
    (made.out / "leaderboard.html").write_text("a page")
    (made.out / "notes.txt").write_text("mine")
    return made


@pytest.fixture
def packed(store, tmp_path):
    assert pack_archive(store.out, tmp_path / "out.zip") == ["cache/", "leaderboard.html", "notes.txt"]
    return tmp_path / "out.zip"


def contents(folder):
    files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    return {name: data for name, data in files.items() if MEMBER.fullmatch(name)}


def test_there_and_back_byte_for_byte(store, packed, tmp_path):
    assert unpack_archive(packed, tmp_path / "back") == []
    assert contents(tmp_path / "back") == contents(store.out) and len(contents(store.out)) == 4 * 3 + 3
    pack_archive(tmp_path / "back", tmp_path / "again.zip")
    assert (tmp_path / "again.zip").read_bytes() == packed.read_bytes(), "equal files, equal bytes"
    with zipfile.ZipFile(packed) as other:  # any other tools read it
        assert other.testzip() is None
        other.extractall(tmp_path / "other")
    groups = sorted((tmp_path / "other").glob("group-*.tar"))
    for group in groups:
        with tarfile.open(group, "r:") as opened:
            assert all(member.isreg() and member.mtime == 0 for member in opened)
            opened.extractall(tmp_path / "other")
    assert groups and contents(tmp_path / "other") == contents(store.out)


def test_an_archive_of_before_there_were_groups_is_read_alike(store, tmp_path):
    old = tmp_path / "old.zip"
    with zipfile.ZipFile(old, "w") as made:
        for name, data in contents(store.out).items():
            made.writestr(name, data)
    assert Store(old).load_all() == store.load_all() and Archive(old).lost == [] and verify(old) == []
    assert unpack_archive(old, tmp_path / "back") == [] and contents(tmp_path / "back") == contents(store.out)


@given(st.lists(st.binary(max_size=3000), max_size=12), st.integers(1, 5000))
def test_groups_give_back_what_was_put_in_and_are_as_large_as_they_should_be(texts, least):
    files = [(f"records/{place:032x}.json", data) for place, data in enumerate(texts)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "GROUP_BYTES", least)
        made = list(groups.pack_groups(files))
    parts = [list(groups.unpack_group(data)) for _, data in made]
    assert [file for part in parts for file in part] == files
    sizes = [sum(512 + len(data) for _, data in part) for part in parts]
    assert all(size >= least for size in sizes[:-1]) and all(
        size - len(part[-1][1]) - 512 < least for size, part in zip(sizes, parts, strict=True)
    )
    assert all(groups.GROUP.fullmatch(name) for name, _ in made) and len(dict(made)) == len(made)


def test_records_in_groups_are_smaller_than_each_for_itself(tmp_path):
    """What the groups are for: the records of a sweep have most of their words in common."""
    board = Path(__file__).parents[1] / "leaderboards" / "results" / "bank-marketing-two-cores" / "records.zip"
    assert unpack_archive(board, tmp_path / "b") == []
    pack_archive(tmp_path / "b", tmp_path / "grouped.zip")
    with zipfile.ZipFile(tmp_path / "each.zip", "w", zipfile.ZIP_LZMA) as made:
        for name, data in contents(tmp_path / "b").items():
            made.writestr(name, data)
    assert (tmp_path / "grouped.zip").stat().st_size < 0.6 * (tmp_path / "each.zip").stat().st_size


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
    pack_archive(tmp_path / "base", tmp_path / "base.zip")
    assert verify(tmp_path / "base.zip") == [] and history(tmp_path / "base.zip") == [line]
    with pytest.raises(UsageError, match="is an archive; a baseline that moves is a folder"):
        accept(packed, tmp_path / "base.zip", "again")


def test_the_commands_take_an_archive(store, tmp_path, monkeypatch):
    def run(*words):
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert result.exception is None or isinstance(result.exception, SystemExit | UsageError), result.exception
        return result.exit_code, str(result.exception or "") + result.output

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recheck, "recheck", lambda *_: recheck.Findings((), ()))  # these records are of no data
    code, message = run("pack", "out")
    assert code == 0 and "out.zip" in message and "left out: cache/, leaderboard.html, notes.txt" in message
    assert "is there already" in run("pack", "out")[1] and "holds no records" in run("pack", "out.zip")[1]
    assert run("verify", "out.zip")[0] == 0 and "is no folder" in run("verify", "nowhere.zip")[1]
    assert compare(Path("out.zip"), store.out).exit_code == compare(store.out, Path("out.zip")).exit_code
    assert "4 records of ppbench" in run("claims", "out.zip")[1]
    assert "--out FOLDER is where" in run("leaderboard", "out.zip")[1]
    code, message = run("leaderboard", "out.zip", "--out", "drawn")
    assert code == 0 and Path("drawn/leaderboard.html").is_file() and verify(Path("drawn")) == []
    tables = [f"drawn/{name}" for name in ("leaderboard.html", "leaderboard.csv", "worst_case.csv")]
    figures = [path for path in Path("drawn/figures").iterdir() if path.suffix in {".svg", ".png"}]
    assert message.splitlines() == [*tables, f"{len(figures)} figures in drawn/figures"] and figures
    last = store.load_all()[-1]
    assert time_of(Path("drawn"), last) == time_of(store.out, last)
    assert "not empty" in run("leaderboard", "out.zip", "--out", "drawn")[1]


def flipped(path, name):
    """Change a byte amid the packed ones of a member."""
    with zipfile.ZipFile(path) as opened:
        member = opened.getinfo(name)
    data = bytearray(path.read_bytes())
    data[member.header_offset + 30 + len(member.filename) + member.compress_size // 2] ^= 0x10
    path.write_bytes(data)


@pytest.fixture
def apart(store, tmp_path, monkeypatch):
    """The archive with each of a cell's files in a group of its own."""
    monkeypatch.setattr(groups, "GROUP_BYTES", 1)
    pack_archive(store.out, tmp_path / "apart.zip")
    return tmp_path / "apart.zip"


@pytest.mark.parametrize("end", all_but_nightly([".json", ".safetensors", ".timing.json"], [".timing.json"]))
def test_a_flipped_byte_costs_its_group_or_its_images_alone(store, apart, tmp_path, end):
    place = store.ids()[1]
    inner = sorted(name for name in contents(store.out) if groups.GROUPED_FILE.fullmatch(name))
    group = f"group-{inner.index(f'records/{place}{end}'):04}.tar" if end != ".safetensors" else ""
    member = group or f"records/{place}{end}"
    named = group or f"{place}{end}"
    flipped(apart, member)
    problems = verify(apart)
    assert named in problems[0] and "damaged" in problems[0]
    orphans = [f"{place}.timing.json: not a file of any finished cell"] if end == ".json" else []
    assert problems[1:] == orphans
    records, unread = Store(apart).readable()
    assert len(records) == (3 if end == ".json" else 4) and len(unread) == bool(group)
    if group:
        with pytest.raises(UsageError, match=f"{group} cannot be read, and no file in it"):
            Store(apart).load_all()
    damaged = unpack_archive(apart, tmp_path / "back")
    assert len(damaged) == 1 and named in damaged[0]
    assert len(contents(tmp_path / "back")) == len(contents(store.out)) - 1
    result = CliRunner().invoke(app, ["leaderboard", str(apart), "--out", str(tmp_path / "drawn")])
    assert result.exit_code == 1 and named in result.output and (tmp_path / "drawn/leaderboard.csv").is_file()


def test_a_file_that_would_fill_a_group_is_a_member_of_its_own(store, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "UNGROUPED_BYTES", (store.folder / f"{store.ids()[0]}.json").stat().st_size)
    pack_archive(store.out, tmp_path / "some.zip")
    with zipfile.ZipFile(tmp_path / "some.zip") as opened:
        own = [name for name in opened.namelist() if name.startswith("records/") and name.endswith(".json")]
        assert own and "group-0000.tar" in opened.namelist()
    assert Store(tmp_path / "some.zip").load_all() == store.load_all() and verify(tmp_path / "some.zip") == []
    assert unpack_archive(tmp_path / "some.zip", tmp_path / "back") == []
    assert contents(tmp_path / "back") == contents(store.out)


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
    for read in (Store, lambda path: unpack_archive(path, tmp_path / "deep" / "back")):
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


def block(name=f"records/{CELL}.json", kind=tarfile.REGTYPE, size=2, data=b"{}", link=""):
    """Return a file of a tar as anyone could write it."""
    about = tarfile.TarInfo(name)
    about.type, about.size, about.linkname = kind, size, link
    return about.tobuf(tarfile.GNU_FORMAT) + data.ljust(512, b"\0")


@pytest.mark.parametrize(
    ("group", "why"),
    [
        *((block(name), "is no file of results") for name in BAD if name and "\0" not in name),
        (block("ppbench.json"), "is no file of results"),
        (block(f"records/{CELL}.safetensors"), "is no file of results"),
        (block(kind=tarfile.SYMTYPE, link="/etc/passwd"), "is no file of results"),
        (block(kind=tarfile.LNKTYPE, link=f"records/{CELL}.json"), "is no file of results"),
        (block(kind=tarfile.CHRTYPE), "is no file of results"),
        (block(kind=tarfile.XHDTYPE, data=b"30 path=../../../../evil.json\n"), "is no file of results"),
        (block(kind=tarfile.GNUTYPE_SPARSE), "is no file of results"),
        (block(size=513), "states 513 bytes"),
        (block(size=1 << 40), "states"),
        (block(size=-1), "states -1 bytes"),
        (block() * 2, f"holds records/{CELL}.json after records/{CELL}.json"),
        (block() + block(f"records/{'0' * 32}.json"), "holds records/0+.json after records/a+.json"),
        (b"no tar" * 200, "is no tar"),
        (block()[:100], "is no tar"),
        (block().replace(b"records", b"Records", 1), "is no tar"),  # its sum is another's
    ],
)
def test_a_group_that_is_none_of_ours_is_refused(tmp_path, group, why):
    path = zipped(tmp_path / "a.zip", ("group-0000.tar", group))
    for read in (lambda: Store(path).readable(), lambda: unpack_archive(path, tmp_path / "deep" / "back")):
        with pytest.raises(UsageError, match=f"is refused: its member group-0000.tar .*{why}"):
            read()
    assert [p.name for p in tmp_path.iterdir()] == ["a.zip"]


def test_a_file_in_two_groups_or_beside_its_group_is_refused(tmp_path, monkeypatch):
    both = [("group-0000.tar", block()), ("group-0001.tar", block())]
    beside = [("group-0000.tar", block()), (f"records/{CELL}.json", b"{}")]
    mixed = [("group-0000.tar", block(f"records/{'c' * 32}.json")), ("group-0001.tar", block())]
    for members, why in ((both, "after"), (beside, "twice"), (mixed, "after records/c+.json")):
        with pytest.raises(UsageError, match=f"holds records/{CELL}.json {why}"):
            Store(zipped(tmp_path / "a.zip", *members)).ids()
    with pytest.raises(UsageError, match=r"'group-0000\.tar' would unfold to \d+ bytes"):
        Store(zipped(tmp_path / "a.zip", ("group-0000.tar", bytes(groups.MOST_BYTES + 1))))
    with pytest.raises(UsageError, match=r"its member 'group-1\.tar' is no file of results"):
        Store(zipped(tmp_path / "a.zip", ("group-1.tar", block())))
    monkeypatch.setattr(module, "MAX_MEMBERS", 2)
    others = b"".join(block(f"records/{place:032x}.json") for place in range(3))
    with pytest.raises(UsageError, match="would unfold to more than 2 files"):
        Store(zipped(tmp_path / "a.zip", ("group-0000.tar", others))).ids()


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
    monkeypatch.setattr(module, "MAX_MEMBERS", 2)
    with pytest.raises(UsageError, match="would unfold to 3 files"):
        Store(zipped(tmp_path / "many.zip", ("sources.json", b""), ("accepted.jsonl", b"")))


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
def test_a_member_that_lies_about_its_size_is_unfolded_no_further(tmp_path, monkeypatch, method):
    path = zipped(tmp_path / "a.zip", ("sources.json", bytes(1 << 24)), method=method)
    data, place = path.read_bytes(), path.read_bytes().rindex(b"sources.json") - 46
    path.write_bytes(data[: place + 24] + struct.pack("<I", 100) + data[place + 28 :])  # the size in the directory
    lengths, real = [], module._unfold
    monkeypatch.setattr(module, "_unfold", lambda *a: lengths.append(len(got := real(*a))) or got)
    with pytest.raises(OSError, match="damaged: not the bytes that were packed"):
        Archive(path).read("sources.json")
    assert lengths == [101]


@pytest.mark.parametrize("manifest", boards(BOARDS), ids=lambda path: path.parent.name)
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
    assert size <= 15_000_000, "three seeds of every board, reconstructions left out"
    path = folder / "bank-marketing-two-cores" / "records.zip"
    result = CliRunner().invoke(app, ["leaderboard", str(path), "--out", str(tmp_path / "drawn")])
    assert result.exit_code == 0 and verify(path) == [] and verify(tmp_path / "drawn") == [], result.output
    assert (tmp_path / "drawn" / "worst_case.csv").read_bytes() == (path.parent / "worst_case.csv").read_bytes()
    assert "Controls hold." in (tmp_path / "drawn" / "leaderboard.html").read_text()
