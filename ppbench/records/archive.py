"""Results in one file: a zip of the files of `MEMBER`, safe to open wherever it comes from.

Its bytes are a function of the folder's. Records and times are members in groups; archives made before
2026-11-26 have each as a member of its own, and are read too. Archives are not trusted: members that `pack` would not
write, or that unfold beyond `MEMBER_BYTES`, `TOTAL_BYTES` or `RATIO`, are refused before anything is read; a group is
refused as a whole when it is unfolded. A damaged member is an OSError of its own; a damaged group, `Archive.lost`.
"""

from __future__ import annotations

import errno
import io
import lzma
import re
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import chain
from pathlib import Path

from ppbench.base.errors import UsageError
from ppbench.base.files import kind_of, listing, read_regular, unwritable, write_output

# -- Groups: small files of results in one tar, as large as the window of the archive's compressor --
# Records of one sweep are similar. Packed one by one, 1,620 of them take 4.4 MB; in tars of 8 MB, 1.8. Any tar
# program reads a group; this module reads only plain headers of regular files of ours, so that nothing else has to
# be safe.

GROUP = re.compile(r"group-[0-9]{4}\.tar")
GROUPED_FILE = re.compile(r"records/[0-9a-f]{32}\.(?:json|timing\.json)|times/[0-9a-f]{32}\.json")
"""Names of files that a group can hold."""
GROUP_BYTES = 1 << 23
"""Size at which a group is closed: the window of zipfile's LZMA is 8 MiB."""
UNGROUPED_BYTES = GROUP_BYTES
"""Size from which a file is in no group."""
MOST_BYTES = 4 * GROUP_BYTES
"""Upper bound of a group's size."""
_BLOCK = tarfile.BLOCKSIZE


def pack_groups(files: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
    """Yield groups (name, bytes) of files (name, bytes) in order; equal files give equal groups. Names increase."""
    pending: list[tuple[str, bytes]] = []
    number = size = 0
    for name, data in files:
        pending.append((name, data))
        size += len(data) + _BLOCK
        if size >= GROUP_BYTES:
            yield f"group-{number:04}.tar", _tar(pending)
            pending, number, size = [], number + 1, 0
    if pending:
        yield f"group-{number:04}.tar", _tar(pending)


def _tar(files: list[tuple[str, bytes]]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in files:
            info = tarfile.TarInfo(name)  # no owner, no day
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def unpack_group(group: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the files of a group, name and bytes. Raises ValueError, a clause: it is not as `pack_groups` writes it."""
    at = 0
    while group[at : at + _BLOCK].strip(b"\0"):
        try:  # no header but a plain one is understood, so no link, path or size comes from anywhere else
            info = tarfile.TarInfo.frombuf(group[at : at + _BLOCK], "ascii", "strict")
        except (tarfile.HeaderError, ValueError) as cause:
            raise ValueError(f"is no tar ({cause})") from cause
        start, at = at + _BLOCK, at + _BLOCK + -(-info.size // _BLOCK) * _BLOCK
        if info.type != tarfile.REGTYPE or GROUPED_FILE.fullmatch(info.name) is None:
            raise ValueError(f"holds {info.name[:80]!r}, which is no file of results")
        if not 0 <= info.size <= len(group) - start:
            raise ValueError(f"states {info.size} bytes of {info.name}, which it has not")
        yield info.name, group[start : start + info.size]


MEMBER = re.compile(
    r"(?:ppbench|selftest|sources|origin|submission)\.json|accepted\.jsonl|(?:leaderboard|worst_case)\.csv|"
    rf"records/[0-9a-f]{{32}}\.safetensors|{GROUPED_FILE.pattern}"
)
MAX_MEMBERS = 200_000  # of groups too
MEMBER_BYTES = 1 << 30
TOTAL_BYTES = 1 << 35
RATIO, FREE_BYTES = 200, 1 << 24
"""Largest ratio of unfolded size to archive size, beyond `FREE_BYTES`; groups of records have 10 to 45."""
_KNOWN = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA)
_DICTIONARY = 1 << 27  # bytes of memory that LZMA may take
_DAY = (1980, 1, 1, 0, 0, 0)  # the first that a zip can state
_HEADER = 30  # bytes of a member's own header before its name


class Folder:
    """The files of results in a folder, which need not exist yet, by relative path with "/"."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost: list[str] = []

    def names(self, folder: str = "") -> list[str]:
        """Return the sorted names in a subfolder, except folders; reading a special file fails."""
        inner = self.path / folder
        if kind_of(inner) != "folder":
            return []
        return [path.name for path in listing(inner) if kind_of(path, follow=False) != "folder"]

    def holds(self, name: str) -> bool:
        """Return whether `name` exists and is no folder."""
        return kind_of(self.path / name, follow=False) not in (None, "folder")

    def read(self, name: str) -> bytes:
        """Return a file's bytes. Raises FileNotFoundError, or another OSError: it cannot be read."""
        return read_regular(self.path / name)


class Archive:
    """Results in one file. Each group is unfolded once for the names in it; the last unfolded one is cached."""

    def __init__(self, path: Path) -> None:
        """Open an archive, unfolding nothing; UsageError: it is no complete zip as `ppbench pack` writes it."""
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
        """Refuse an archive with faults in its directory (UsageError)."""
        names: set[str] = set()
        for member in members:
            if why := _refusal(member, names):
                raise UsageError(f"{self.path} is refused: its member {member.orig_filename[:80]!r} {why}.")
            names.add(member.filename)
        total, most = sum(member.file_size for member in members), RATIO * self.path.stat().st_size
        if len(members) > MAX_MEMBERS or total > min(TOTAL_BYTES, max(FREE_BYTES, most)):
            raise UsageError(f"{self.path} is refused: it would unfold to {len(members)} files of {total} bytes.")

    @cached_property
    def _index(self) -> tuple[dict[str, str], list[str]]:
        """The group or member of each file; a sentence for each damaged group. UsageError: not as `pack` writes it.

        Names must increase from group to group; else reading in order could unfold a group for each file.
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
            if len(places) > MAX_MEMBERS:
                raise UsageError(f"{self.path} is refused: it would unfold to more than {MAX_MEMBERS} files.")
        return places, lost

    @property
    def lost(self) -> list[str]:
        """A sentence for each damaged group, whose files are unknown."""
        return self._index[1]

    def names(self, folder: str = "") -> list[str]:
        """Return the sorted names of the files in a folder."""
        start = f"{folder}/" if folder else ""
        inner = (name.removeprefix(start) for name in self._index[0] if name.startswith(start))
        return sorted(name for name in inner if "/" not in name)

    def holds(self, name: str) -> bool:
        """Return whether the archive has a file `name`."""
        return name in self._members or name in self._index[0]

    def read(self, name: str) -> bytes:
        """Return a file's bytes. Raises FileNotFoundError, or another OSError: its member is damaged."""
        if name in self._members and MEMBER.fullmatch(name):
            return self._member(self._members[name])
        if name not in self._index[0]:
            raise FileNotFoundError(errno.ENOENT, "no such member", name)
        return self._group(self._index[0][name])[name]

    def _group(self, member: str, before: str = "") -> dict[str, bytes]:
        """Return the files in a group by name, all after `before`. OSError: damaged; UsageError: malformed."""
        if self._last[0] != member:
            files: dict[str, bytes] = {}
            try:
                for name, data in unpack_group(self._member(self._members[member])):
                    if name <= before:
                        raise ValueError(f"holds {name} after {before}")
                    before, files[name] = name, data
            except ValueError as cause:
                raise UsageError(f"{self.path} is refused: its member {member} {cause}.") from cause
            self._last = member, files
        return self._last[1]

    def _member(self, member: zipfile.ZipInfo) -> bytes:
        """Return a member's unfolded bytes. Raises OSError: it is damaged."""
        with self.path.open("rb") as file:
            file.seek(member.header_offset)
            header = file.read(_HEADER)
            skipped = sum(struct.unpack("<HH", header[-4:])) if len(header) == _HEADER else 0
            file.seek(member.header_offset + _HEADER + skipped)
            packed = file.read(member.compress_size)
        try:
            data = _unfold(packed, member)
        except (zlib.error, lzma.LZMAError, EOFError, ValueError) as cause:
            raise OSError(errno.EIO, f"damaged: {cause}", member.filename) from cause
        if len(data) != member.file_size or zlib.crc32(data) != member.CRC:
            raise OSError(errno.EIO, "damaged: not the bytes that were packed", member.filename)
        return data


Files = Folder | Archive
"""The files of results; path: of the folder or the archive."""


def _refusal(member: zipfile.ZipInfo, before: set[str]) -> str:
    """Return why a member cannot be accepted after those named `before`, "" if it can."""
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


def _unfold(packed: bytes, member: zipfile.ZipInfo) -> bytes:
    """Return a member's unfolded bytes, at most one byte more than it states."""
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
    """Return the files of a folder, which need not exist, or of an archive. Raises UsageError as `Archive`."""
    return Archive(path) if kind_of(path) == "file" else Folder(path)


SUBMISSION = "submission.json"
"""The file that `ppbench submit` adds to an archive, see `ppbench.ledger.submission`."""


def pack_archive(folder: Path, target: Path, submission: bytes = b"") -> list[str]:
    """Write a folder's archive to `target`, whole or not at all (UsageError); return the names of files left out.

    submission: bytes of submission.json, in place of the folder's own.
    """
    if kind_of(target, follow=False) is not None:
        raise UsageError(f"{target} is there already; give another name for the archive.")
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    kept = sorted(name for name in names if MEMBER.fullmatch(name) and not (folder / name).is_symlink())
    kept = sorted({*kept, SUBMISSION}) if submission else kept
    added, out = {SUBMISSION: submission} if submission else {}, io.BytesIO()
    try:
        small = {n for n in kept if GROUPED_FILE.fullmatch(n) and (folder / n).stat().st_size < UNGROUPED_BYTES}
        texts = ((name, read_regular(folder / name)) for name in kept if name in small)
        others = ((name, added.get(name) or read_regular(folder / name)) for name in kept if name not in small)
        with zipfile.ZipFile(out, "w") as archive:
            for name, data in chain(others, pack_groups(texts)):
                member = zipfile.ZipInfo(name, _DAY)
                member.create_system, member.external_attr = 3, (stat.S_IFREG | 0o644) << 16
                floats = name.endswith(".safetensors")
                member.compress_type = zipfile.ZIP_DEFLATED if floats else zipfile.ZIP_LZMA
                archive.writestr(member, data)
    except OSError as cause:
        raise UsageError(f"{folder} cannot be packed ({cause}).") from cause
    write_output(target, out.getvalue())
    return sorted({f"{name.partition('/')[0]}/" if "/" in name else name for name in names - {*kept}})


def unpack_archive(archive: Path, folder: Path) -> list[str]:
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
