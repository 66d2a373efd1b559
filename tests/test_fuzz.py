"""Bad input by the thousand: one sentence, the code for it, nothing written, nothing trained, soon."""

import contextlib
import hashlib
import io
import os
import random
import re
import signal
import sys
import time
import traceback
from collections import Counter, defaultdict
from dataclasses import replace
from math import inf, nextafter
from pathlib import Path

import pytest
from bad_inputs import Case, cases, evaluated, numeric
from daily import every_third
from faulty_files import EVERY, composed

from ppbench import commands as cli
from ppbench.adversary.attack import Attack
from ppbench.base.errors import UsageError, because, shown
from ppbench.base.registry import load_plugin
from ppbench.federation.contract import Defense
from ppbench.records.store import Store
from ppbench.task.user_data import open_dataset

SEED = 16
LIMIT = 20.0
UNFIT = re.compile(
    r"Traceback|object at 0x|weights_only|pydantic|errors\.pydantic|unexpected keyword|refuses =|\{\}", re.I
)
FOUND = ("traceback", "hang", "files", "code", "sentence", "accepted")


class Hang(BaseException):
    """The time for a case is up."""


class Accepted(BaseException):
    """The input was taken for good: what comes next writes the first file."""


def tree(folder: Path) -> dict[str, str]:
    """Return every file below `folder` with a digest of what it holds."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files} | {
        str(path): "folder" for path in folder.rglob("*") if path.is_dir()
    }


def ended(words) -> tuple[object, str, str]:
    """Run the command line in this process; return its code (or what it raised), and both outputs."""
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["ppbench", *words]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        except (Hang, Accepted) as stop:
            code = stop
        except BaseException as error:  # noqa: BLE001 - whatever comes out is what is looked for
            traceback.print_exc(file=err)
            code = error
    return code, out.getvalue(), err.getvalue()


def wrong(case: Case, code: object, err: str) -> str:
    """Return what is wrong with how a case ended, one of `FOUND`, or nothing."""
    if isinstance(code, Hang):
        return "hang"
    if isinstance(code, Accepted):
        return "accepted"
    if isinstance(code, BaseException) or "Traceback" in err:
        return "traceback"
    if code not in case.codes:
        return "code"
    printed = [line for line in err.splitlines() if line and not line.startswith("warning: ")]
    fit = len(printed) == 1 and printed[0].startswith("ppbench: ") and printed[0][-1] in ".?" and len(printed[0]) < 700
    printable = all(c.isprintable() for line in printed for c in line)
    return "" if fit and printable and not UNFIT.search(err) else "sentence"


def tried(case: Case, home: Path, seed: int) -> tuple[str, str]:
    """Run one case in a folder of its own; return what is wrong and what it said."""
    home.mkdir()
    os.chdir(home)
    if case.make is not None:
        case.make(home, random.Random(seed))
    before = tree(home)
    os.environ.update(case.env)
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    try:
        code, _, err = ended(case.words)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for name in case.env:
            del os.environ[name]
    failures = wrong(case, code, err)
    return ("files" if not failures and tree(home) != before else failures), f"{code!r}: {err.strip()[-600:]}"


@pytest.fixture
def quiet(monkeypatch, tmp_path):
    """Nothing may be trained, and nothing reaches for this machine's own data or caches."""

    def raised(error):
        def stop(*_):
            raise error

        return stop

    monkeypatch.setattr(Store, "prepare", raised(Accepted()))
    for name in ("PPBENCH_DATA", "PPBENCH_CACHE", "HOME", "TORCH_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.chdir(tmp_path)
    old = signal.signal(signal.SIGALRM, raised(Hang()))
    yield tmp_path
    signal.signal(signal.SIGALRM, old)


def table(counts, result) -> str:
    """Return the classes with their counts, a line each."""
    lines = [f"{'class':<20} {'cases':>6} " + " ".join(f"{name:>9}" for name in FOUND)]
    for kind, count in sorted(counts.items()):
        lines.append(f"{kind:<20} {count:>6} " + " ".join(f"{result[kind][name]:>9}" for name in FOUND))
    return "\n".join(lines)


def test_bad_input_is_refused_in_one_sentence(quiet, pytestconfig, capsys):
    """100 in a usual run, 3,000 in the whole; PPBENCH_FUZZ=SEED:COUNT asks others, `pytest -s` shows the counts."""
    count = 3000 if pytestconfig.getoption("--battery") == "whole" else 100
    seed, _, more = os.environ.get("PPBENCH_FUZZ", f"{SEED}:{count}").partition(":")
    counts, result, outcome = Counter(), defaultdict(Counter), []
    start = time.process_time()
    for place, case in enumerate(cases(int(seed), int(more))):
        counts[case.kind] += 1
        what, printed = tried(case, quiet / f"{place}", place)
        if what:
            result[case.kind][what] += 1
            outcome.append(f"{what}: {case.kind}: ppbench {' '.join(map(repr, case.words))[:700]}\n    {printed}")
    print(table(counts, result), f"\n{sum(counts.values())} cases, {time.process_time() - start:.1f} s of a core")
    assert not outcome, f"{len(outcome)} of {sum(counts.values())}:\n" + "\n".join(outcome[:200])


@pytest.mark.parametrize("name", every_third(EVERY))
def test_a_file_with_a_fault_is_read_right_or_refused_with_what_reads_it_right(quiet, name):
    case = EVERY[name]
    if case.words:
        refused = evaluated("files with faults", make=case.make, dataset=case.dataset, model="mlp")
        wrong_by, message = tried(refused, quiet / "refused", SEED)
        assert not wrong_by, f"{wrong_by}: {message}"
        assert [word for word in case.words if word not in message] == [], message
    if case.words and not case.remedy:
        return
    os.chdir(quiet)
    for make in (case.make, *([case.right[1]] if case.right else [])):
        make(quiet, random.Random(SEED))
    made = open_dataset(case.dataset.partition("?")[0] + case.remedy if case.remedy else case.dataset, seed=0)
    assert case.right is None or made.sha256() == open_dataset(case.right[0], seed=0).sha256()


@pytest.mark.parametrize("seed", every_third(range(30)))
def test_several_faults_at_once_are_read_right_by_their_options_and_never_wrongly(quiet, seed):
    dataset, make, (right, make_right) = composed(random.Random(seed))
    for one in (make, make_right):
        one(quiet, random.Random(SEED))
    digest = open_dataset(right, seed=0).sha256()
    assert open_dataset(dataset, seed=0).sha256() == digest
    try:
        made = open_dataset("csv:d.csv", seed=0).sha256()
    except UsageError:
        return
    assert made == digest


@pytest.mark.parametrize(("group", "base"), [("defenses", Defense), ("attacks", Attack)])
def test_every_number_of_a_plugin_has_two_ends_that_hold(group, base):
    """The ends are right, one step beyond is not, and neither is what is no number."""
    for plugin, name, kind, least, most in numeric(group):
        made = load_plugin(group, plugin)()
        check = Defense.check_bounds if base is Defense else Attack.check
        check(replace(made, **{name: least}))
        check(replace(made, **{name: most}))
        step = (least - 1, most + 1) if kind is int else (nextafter(least, -inf), nextafter(most, inf))
        for value in (*step, float("nan"), inf, -inf):
            if value == 0:  # below a least that is 0 or more "none" may stand, which is 0
                continue
            with pytest.raises(UsageError, match=rf"{name}="):
                check(replace(made, **{name: value}))


def test_what_is_repeated_is_short_and_printable():
    assert len(shown("x" * 100_000)) <= 80 and len(shown(10**9999)) <= 80
    assert shown("a\x1b[31m\n\udcff") == "'a\\x1b[31m\\n\\udcff'"
    assert str(UsageError("one\ntwo \x1b[31m \ud800")) == "one two \\x1b[31m \\ud800"
    assert len(str(UsageError("y" * 10_000))) <= 240
    assert because(ValueError("cannot identify <_io.BytesIO object at 0x7f00>\nmore.")) == "cannot identify it more"
