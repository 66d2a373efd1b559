"""Results in one file: a zip of the files of `MEMBER`, safe to open wherever it comes from.

Its bytes are a function of the folder's. Records and times are members in groups (`groups.py`); archives made before
2026-11-26 have each as a member of its own, and are read alike. Nothing is believed: what `pack` would not write, or
would unfold beyond `MEMBER_BYTES`, `TOTAL_BYTES` or `RATIO`, is refused before anything is read; a group is, as a
whole, when it is unfolded. A damaged member is an OSError of its own; a damaged group, `Archive.lost`.
"""

from __future__ import annotations

import errno
import io
import lzma
import re
import stat
import struct
import zipfile
import zlib
from functools import cached_property
from itertools import chain
from pathlib import Path

from ppbench.base.errors import UsageError
from ppbench.base.files import kind_of, listing, read_regular, unwritable, write_output
from ppbench.records.groups import GROUP, GROUP_BYTES, INSIDE, MOST_BYTES, grouped, split

MEMBER = re.compile(
    r"(?:ppbench|selftest|sources|origin|submission)\.json|accepted\.jsonl|(?:leaderboard|worst_case)\.csv|"
    rf"records/[0-9a-f]{{32}}\.safetensors|{INSIDE.pattern}"
)
MEMBERS = 200_000  # of groups too
MEMBER_BYTES = 1 << 30
TOTAL_BYTES = 1 << 35
RATIO, FREE_BYTES = 200, 1 << 24
"""How many times its own size an archive may unfold to, beyond `FREE_BYTES`; groups of records give 10 to 45."""
_KNOWN = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA)
_DICTIONARY = 1 << 27  # bytes of memory that LZMA may take
_DAY = (1980, 1, 1, 0, 0, 0)  # the first that a zip can state
_HEADER = 30  # bytes of a member's own header before its name


class Folder:
    """The files of results in a folder, which need not exist yet, by their names below it, with "/" between."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost: list[str] = []

    def names(self, folder: str = "") -> list[str]:
        """Return the names in a folder of it that are no folders', sorted: who reads what is no file is told."""
        inner = self.path / folder
        if kind_of(inner) != "folder":
            return []
        return [path.name for path in listing(inner) if kind_of(path, follow=False) != "folder"]

    def holds(self, name: str) -> bool:
        """Return whether something is called so, and is no folder."""
        return kind_of(self.path / name, follow=False) not in (None, "folder")

    def read(self, name: str) -> bytes:
        """Return a file's bytes. Raises FileNotFoundError, or another OSError where it cannot be read."""
        return read_regular(self.path / name)


class Archive:
    """Results in one file, each group unfolded once to learn the names in it, and the last one kept."""

    def __init__(self, path: Path) -> None:
        """Open an archive, unfolding nothing; UsageError where it is no whole zip such as `ppbench pack` writes."""
        self.path = path
        try:
            with zipfile.ZipFile(path) as opened:
                members = opened.infolist()
        except (zipfile.BadZipFile, ValueError, struct.error, EOFError, NotImplementedError, OSError) as cause:
            raise UsageError(f"{path} is a file and no whole archive of results ({cause}); give a folder.") from cause
        self._check(members)
        self._members = {member.filename: member for member in members}
        self._last: tuple[str, dict[str, bytes]] = ("", {})

    def _check(self, members: list[zipfile.ZipInfo]) -> None:
        """Refuse an archive for what its directory says (UsageError)."""
        names: set[str] = set()
        for member in members:
            if why := _refusal(member, names):
                raise UsageError(f"{self.path} is refused: its member {member.orig_filename[:80]!r} {why}.")
            names.add(member.filename)
        total, most = sum(member.file_size for member in members), RATIO * self.path.stat().st_size
        if len(members) > MEMBERS or total > min(TOTAL_BYTES, max(FREE_BYTES, most)):
            raise UsageError(f"{self.path} is refused: it would unfold to {len(members)} files of {total} bytes.")

    @cached_property
    def _index(self) -> tuple[dict[str, str], list[str]]:
        """Which group or member each file is in; a sentence for each damaged group. UsageError: not as we write it.

        Names increase from group to group, or reading in their order could unfold a group for each file.
        """
        groups = sorted(member for member in self._members if GROUP.fullmatch(member))
        places, last, lost = {m: m for m in self._members if m not in groups}, "", []
        for member in groups:
            try:
                inner = list(self._group(member, last))
            except OSError as cause:
                lost.append(f"{self.path / member} cannot be read, and no file in it ({cause.strerror}).")
                continue
            if twice := next((name for name in inner if name in places), ""):
                raise UsageError(f"{self.path} is refused: it holds {twice} twice.")
            places |= dict.fromkeys(inner, member)
            last = max([last, *inner])
            if len(places) > MEMBERS:
                raise UsageError(f"{self.path} is refused: it would unfold to more than {MEMBERS} files.")
        return places, lost

    @property
    def lost(self) -> list[str]:
        """A sentence for each damaged group: what files were in it is not known."""
        return self._index[1]

    def names(self, folder: str = "") -> list[str]:
        """Return the names of the files in a folder of it, sorted."""
        start = f"{folder}/" if folder else ""
        inner = (name.removeprefix(start) for name in self._index[0] if name.startswith(start))
        return sorted(name for name in inner if "/" not in name)

    def holds(self, name: str) -> bool:
        """Return whether there is such a file."""
        return name in self._members or name in self._index[0]

    def read(self, name: str) -> bytes:
        """Return a file's bytes. Raises FileNotFoundError, or another OSError where its member is damaged."""
        if name in self._members and MEMBER.fullmatch(name):
            return self._member(self._members[name])
        if name not in self._index[0]:
            raise FileNotFoundError(errno.ENOENT, "no such member", name)
        return self._group(self._index[0][name])[name]

    def _group(self, member: str, before: str = "") -> dict[str, bytes]:
        """Return the files in a group by name, all after `before`. OSError: damaged; UsageError: not as we write it."""
        if self._last[0] != member:
            files: dict[str, bytes] = {}
            try:
                for name, data in split(self._member(self._members[member])):
                    if name <= before:
                        raise ValueError(f"holds {name} after {before}")
                    before, files[name] = name, data
            except ValueError as cause:
                raise UsageError(f"{self.path} is refused: its member {member} {cause}.") from cause
            self._last = member, files
        return self._last[1]

    def _member(self, member: zipfile.ZipInfo) -> bytes:
        """Return what a member unfolds to. Raises OSError where it is damaged."""
        with self.path.open("rb") as file:
            file.seek(member.header_offset)
            header = file.read(_HEADER)
            skipped = sum(struct.unpack("<HH", header[-4:])) if len(header) == _HEADER else 0
            file.seek(member.header_offset + _HEADER + skipped)
            packed = file.read(member.compress_size)
        try:
            data = _unfolded(packed, member)
        except (zlib.error, lzma.LZMAError, EOFError, ValueError) as cause:
            raise OSError(errno.EIO, f"damaged: {cause}", member.filename) from cause
        if len(data) != member.file_size or zlib.crc32(data) != member.CRC:
            raise OSError(errno.EIO, "damaged: not the bytes that were packed", member.filename)
        return data


Files = Folder | Archive
"""The files of results; path: of the folder or the archive."""


def _refusal(member: zipfile.ZipInfo, before: set[str]) -> str:
    """Return why a member cannot be accepted beside those named `before`, "" where it can."""
    if (MEMBER.fullmatch(member.orig_filename) or GROUP.fullmatch(member.orig_filename)) is None:
        return "is no file of results"
    if member.filename in before:
        return "is there twice"
    if stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG):
        return "is a link or a device"
    if member.flag_bits & 1 or member.compress_type not in _KNOWN:
        return "is encrypted or packed by a method other than deflate and LZMA"
    most = MOST_BYTES if GROUP.fullmatch(member.orig_filename) else MEMBER_BYTES
    return f"would unfold to {member.file_size} bytes" if member.file_size > most else ""


def _unfolded(packed: bytes, member: zipfile.ZipInfo) -> bytes:
    """Return what a member's `packed` bytes unfold to, at most one byte more than it states."""
    most = member.file_size + 1
    if member.compress_type == zipfile.ZIP_STORED:
        return packed
    if member.compress_type == zipfile.ZIP_DEFLATED:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, most)
    # A zip's LZMA: version and length of the properties, five bytes of properties, the stream. A .lzma file has the
    # properties, an unknown length, and the same stream.
    alone = lzma.LZMADecompressor(lzma.FORMAT_ALONE, memlimit=_DICTIONARY)
    return alone.decompress(packed[4:9] + b"\xff" * 8 + packed[9:], most)


def files_of(path: Path) -> Files:
    """Return the files of a folder, which need not exist, or of an archive. Raises UsageError, see `Archive`."""
    return Archive(path) if kind_of(path) == "file" else Folder(path)


SUBMISSION = "submission.json"
"""What `ppbench submit` adds to an archive, see `ppbench.ledger.submission`."""


def pack(folder: Path, target: Path, submission: bytes = b"") -> list[str]:
    """Write a folder's archive to `target`, whole or not at all (UsageError); return the names of what was left out.

    submission: what the archive says of itself as one that is handed in, in the place of the folder's own.
    """
    if kind_of(target, follow=False) is not None:
        raise UsageError(f"{target} is there already; give another name for the archive.")
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    kept = sorted(name for name in names if MEMBER.fullmatch(name) and not (folder / name).is_symlink())
    kept = sorted({*kept, SUBMISSION}) if submission else kept
    added, out = {SUBMISSION: submission} if submission else {}, io.BytesIO()
    try:
        small = {n for n in kept if INSIDE.fullmatch(n) and (folder / n).stat().st_size < GROUP_BYTES}
        texts = ((name, read_regular(folder / name)) for name in kept if name in small)
        others = ((name, added.get(name) or read_regular(folder / name)) for name in kept if name not in small)
        with zipfile.ZipFile(out, "w") as archive:
            for name, data in chain(others, grouped(texts)):
                member = zipfile.ZipInfo(name, _DAY)
                member.create_system, member.external_attr = 3, (stat.S_IFREG | 0o644) << 16
                floats = name.endswith(".safetensors")
                member.compress_type = zipfile.ZIP_DEFLATED if floats else zipfile.ZIP_LZMA
                archive.writestr(member, data)
    except OSError as cause:
        raise UsageError(f"{folder} cannot be packed ({cause}).") from cause
    write_output(target, out.getvalue())
    return sorted({f"{name.partition('/')[0]}/" if "/" in name else name for name in names - {*kept}})


def unpack(archive: Path, folder: Path) -> list[str]:
    """Unpack into a new or empty folder (else UsageError); return a sentence for each file that is damaged."""
    files = Archive(archive)
    if kind_of(folder) is not None and (kind_of(folder) != "folder" or listing(folder)):
        raise UsageError(f"{folder} is not empty; give a new or an empty folder for what {archive.name} holds.")
    problems = [*files.lost]
    for inner in ("", "times", "records"):
        for name in files.names(inner):
            path = folder / inner / name
            try:
                data = files.read(path.relative_to(folder).as_posix())
            except OSError as cause:
                problems.append(f"{archive / inner / name} cannot be read ({cause.strerror}).")
                continue
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            except OSError as cause:
                raise unwritable(path, len(data), cause) from cause
    return problems
