"""Groups: small files of results in one tar, as large as the window of the archive's compressor.

Records of one sweep are similar. Packed one by one, 1,620 of them take 4.4 MB; in tars of 8 MB, 1.8. Any tar program
reads a group; this module reads only plain headers of regular files of ours, so that nothing else has to be safe.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterable, Iterator

GROUP = re.compile(r"group-[0-9]{4}\.tar")
GROUPED_FILE = re.compile(r"records/[0-9a-f]{32}\.(?:json|timing\.json)|times/[0-9a-f]{32}\.json")
"""Names of files that a group can hold."""
GROUP_BYTES = 1 << 23
"""Size at which a group is closed: the window of zipfile's LZMA is 8 MiB. Larger files are in no group."""
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
