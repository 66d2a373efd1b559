"""Hostile files at the door of the ledger: a sentence each, nothing written, memory bounded."""

import hashlib
import re
import signal
from pathlib import Path

import pytest
from daily import every_third
from hostile_ledger import EVERY, TRANSCRIPTS
from test_fuzz import ended

from ppbench.base.errors import UsageError
from ppbench.ledger.transcript import load_transcript

LIMIT = 120
PEAK = 250
"""Megabytes that one such file may cost at its worst moment: the largest that is read at all has 88."""
UNFIT = re.compile(r"Traceback|object at 0x|pydantic|NoneType|unexpected keyword|\{\}", re.I)


def listing(folder: Path, digests: bool = True) -> dict[str, object]:
    """Return all that lies below a folder, no link followed, with what it is: of small files a digest."""
    results: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        about = path.lstat()
        small = digests and path.is_file() and not path.is_symlink() and about.st_size < 1 << 21
        content = hashlib.sha256(path.read_bytes()).hexdigest() if small else about.st_size
        results[str(path)] = (about.st_mode, content, None if path.is_dir() else about.st_mtime_ns)
    return results


def peak() -> int:
    """Return the most memory, in bytes, that this process has had since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def hung(*_):
    raise TimeoutError("a hostile file made it wait")


@pytest.fixture(scope="module")
def costs(published):
    """What each file cost, in bytes; told at the end, when what was published must be as it was."""
    results: dict[str, int] = {}
    before = listing(published.truth.parent)
    yield results
    assert listing(published.truth.parent) == before
    if results:
        worst = max(results, key=results.__getitem__)
        print(f"\n{len(results)} hostile files, at most {results[worst] / 1e6:.1f} MB more than before ({worst})")


@pytest.fixture
def patient():
    """Let what waits for ever fail."""
    old = signal.signal(signal.SIGALRM, hung)
    signal.alarm(LIMIT)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, old)


def fit(sentence: str) -> bool:
    """Return whether it is one sentence that a terminal can print."""
    printable = len(sentence) < 700 and all(c.isprintable() for c in sentence)
    return printable and sentence[-1] in ".?" and not UNFIT.search(sentence)


@pytest.mark.parametrize("name", every_third(EVERY))
def test_a_hostile_file_ends_in_a_sentence(name, published, tmp_path, monkeypatch, costs, patient):
    monkeypatch.chdir(tmp_path)
    words, home = EVERY[name](published, tmp_path), published.truth.parent
    before, at_home = listing(tmp_path), listing(home, digests=False)
    forget_peak()
    start = peak()
    if name in TRANSCRIPTS:  # refused by itself, whatever the organizer would say of it
        with pytest.raises(UsageError) as refused:
            load_transcript(words[1])
        assert fit(str(refused.value)), refused.value
    code, out, err = ended(words)
    costs[name] = peak() - start
    printed = [line for line in err.splitlines() if line and not line.startswith("warning: ")]
    assert code == 2 and out == "", (code, out, err[-1500:])
    assert len(printed) == 1 and printed[0].startswith("ppbench: ") and fit(printed[0]), err
    assert listing(tmp_path) == before and listing(home, digests=False) == at_home
    assert costs[name] < PEAK * 1e6
