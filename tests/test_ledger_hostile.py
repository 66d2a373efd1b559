"""Hostile files at the door of the ledger: a sentence each, nothing written, memory bounded."""

import hashlib
import re
import signal
from pathlib import Path

import pytest
from hostile_ledger import EVERY, TRANSCRIPTS
from test_fuzz import ended

LIMIT = 15
PEAK = 160
"""Megabytes that one such file may cost at its worst moment: a header of 100 MB is read by nobody."""
UNFIT = re.compile(r"Traceback|object at 0x|pydantic|NoneType|unexpected keyword|\{\}", re.I)


def listing(folder: Path) -> dict[str, object]:
    """Return all that lies below a folder, no link followed, with what it is: of small files a digest."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        about = path.lstat()
        small = path.is_file() and not path.is_symlink() and about.st_size < 1 << 21
        content = hashlib.sha256(path.read_bytes()).hexdigest() if small else about.st_size
        found[str(path)] = (about.st_mode, content, None if path.is_dir() else about.st_mtime_ns)
    return found


def peak() -> int:
    """Return the most memory, in bytes, that this process has had since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def hung(*_):
    raise TimeoutError("a hostile file made it wait")


@pytest.fixture(scope="module")
def costs():
    """What each file cost, in bytes; told at the end."""
    found: dict[str, int] = {}
    yield found
    if found:
        worst = max(found, key=found.__getitem__)
        print(f"\n{len(found)} hostile files, at most {found[worst] / 1e6:.1f} MB more than before ({worst})")


@pytest.mark.parametrize("name", EVERY)
def test_a_hostile_file_ends_in_a_sentence(name, published, tmp_path, monkeypatch, costs):
    monkeypatch.chdir(tmp_path)
    words = EVERY[name](published, tmp_path)
    before, at_home = listing(tmp_path), listing(published.truth.parent)
    old = signal.signal(signal.SIGALRM, hung)
    signal.alarm(LIMIT)
    try:
        forget_peak()
        start = peak()
        code, out, err = ended(words)
        costs[name] = peak() - start
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
    said = [line for line in err.splitlines() if line and not line.startswith("warning: ")]
    assert code == 2 and out == "", (code, out, err[-1500:])
    assert len(said) == 1 and said[0].startswith("ppbench: ") and said[0][-1] in ".?" and len(said[0]) < 700, err
    assert all(c.isprintable() for c in said[0]) and not UNFIT.search(said[0]), err
    assert listing(tmp_path) == before and listing(published.truth.parent) == at_home
    assert costs[name] < PEAK * 1e6
