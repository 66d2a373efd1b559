"""Small files of results packed together: a tar, as large as what the archive's compressor looks back over.

Records of one sweep say the same things in the same words. Packed each for itself, 1,620 of them take 4.4 MB; in tars
of 8 MB, 1.8. Any tar program reads a group; we read plain headers of regular files of ours alone, so that nothing else
has to be safe.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterable, Iterator

GROUP = re.compile(r"group-[0-9]{4}\.tar")
INSIDE = re.compile(r"records/[0-9a-f]{32}\.(?:json|timing\.json)|times/[0-9a-f]{32}\.json")
"""What a group can hold."""
GROUP_BYTES = 1 << 23
"""From how many bytes on a group takes no other file: zipfile's LZMA looks back 8 MiB. Larger files are in no group."""
MOST_BYTES = 4 * GROUP_BYTES
"""More than any group has."""
_BLOCK = tarfile.BLOCKSIZE


def grouped(files: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
    """Yield groups, name and bytes, of files in the order given: equal files give equal groups. Names must increase."""
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


def split(group: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the files of a group, name and bytes. Raises ValueError, with a clause, where we would not write it so."""
    at = 0
    while group[at : at + _BLOCK].strip(b"\0"):
        try:  # no header but a plain one is understood, so no link, path or size comes from anywhere else
            info = tarfile.TarInfo.frombuf(group[at : at + _BLOCK], "ascii", "strict")
        except (tarfile.HeaderError, ValueError) as cause:
            raise ValueError(f"is no tar ({cause})") from cause
        start, at = at + _BLOCK, at + _BLOCK + -(-info.size // _BLOCK) * _BLOCK
        if info.type != tarfile.REGTYPE or INSIDE.fullmatch(info.name) is None:
            raise ValueError(f"holds {info.name[:80]!r}, which is no file of results")
        if not 0 <= info.size <= len(group) - start:
            raise ValueError(f"states {info.size} bytes of {info.name}, which it has not")
        yield info.name, group[start : start + info.size]
