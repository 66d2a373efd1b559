"""Exit codes say what became of a command; signals end it soon, with nothing left behind."""

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from ppbench import commands as cli
from ppbench.base.errors import MEANINGS, Exit, Stopped, held_back, stopping
from ppbench.report.controls import defenses_without_result, exit_of

pytestmark = pytest.mark.usefixtures("heard")

TINY = (
    "--rounds 1 --victims 2 --attack dlg --set dlg.budget=1000000 --train 100 --clients 2 --stage init "
    "--attack-batch 1 --grid 0.1"
)


def call(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["ppbench", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code, capsys.readouterr()


@pytest.mark.parametrize(
    ("cells", "reliable", "code"),
    [
        ([("none", "complete", ""), ("dp", "complete", "")], True, Exit.OK),
        ([("none", "complete", ""), ("dp", "failed", "its worker was killed")], True, Exit.FOUND),
        ([("none", "complete", ""), ("dp", "diverged", "not finite")], True, Exit.FOUND),
        ([("none", "complete", ""), ("dp", "complete", ""), ("spn", "diverged", "not finite")], True, Exit.FOUND),
        ([("none", "complete", ""), ("dp", "complete", ""), ("dp", "diverged", "at this value")], True, Exit.OK),
        ([("none", "complete", ""), ("dp", "complete", ""), ("dp", "failed", "nothing can be read")], True, Exit.OK),
        ([("none", "complete", ""), ("dp", "failed", "nothing can be read")], True, Exit.FOUND),
        (
            [("none", "complete", ""), ("dp", "complete", ""), ("dp", "failed", "its worker was killed")],
            True,
            Exit.FOUND,
        ),
        ([("none", "complete", "")], True, Exit.OK),
        ([], True, Exit.FOUND),
        ([("none", "complete", ""), ("dp", "failed", "its worker was killed")], False, Exit.CONTROLS),
    ],
)
def test_nothing_judged_is_never_0(fabricate, cells, reliable, code):
    records = []
    for defense, status, reason in cells:
        record = fabricate(defense, None, "dlg", "reconstruction", 20.0)
        if status != "complete":
            record = record.model_copy(update={"status": status, "reason": reason, "victims": [], "metrics": []})
        records.append(record)
    assert exit_of(records, reliable) is code
    if code is Exit.OK:
        assert defenses_without_result(records) == []


def test_an_error_of_our_own_is_70_with_its_traceback_in_a_file(monkeypatch, capsys, tmp_path):
    def broken(**options):
        raise ZeroDivisionError("of our own")

    monkeypatch.setattr("ppbench.report.compare.outcome.compare", lambda *_: broken())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code, shown = call(monkeypatch, capsys, "compare", "a", "b c")
    [file] = tmp_path.iterdir()
    assert code == 70 and shown.out == ""
    assert shown.err == (
        f"ppbench: An error of ppbench's own (ZeroDivisionError: of our own); the traceback is in {file}: report it "
        "with the command.\n"
    )
    kept = file.read_text()
    assert shlex.join(["ppbench", "compare", "a", "b c"]) in kept and "in broken" in kept
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    code, shown = call(monkeypatch, capsys, "compare", "a", "b c")
    assert code == 70 and "in broken" in shown.err and shown.err.endswith("stands above: report it with the command.\n")


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (SystemExit(0), 70, "SystemExit"),
        (MemoryError(), 2, "This machine has no more memory, files or processes"),
        (OSError(24, "Too many open files", "x"), 2, "This machine has no more memory, files or processes"),
        (RuntimeError("can't start new thread"), 2, "This machine has no more memory, files or processes"),
        (RecursionError("maximum recursion depth exceeded"), 70, "RecursionError"),
        (OSError(36, "File name too long", "x" * 300), 2, "cannot be used (File name too long); give another path."),
        (KeyboardInterrupt(), 130, "interrupted; what is finished is kept"),
        (BrokenPipeError(32, "Broken pipe"), 141, ""),
    ],
)
def test_whatever_is_raised_has_a_code_and_one_sentence(monkeypatch, capsys, tmp_path, error, code, sentence):
    def raised(*_):
        raise error

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("ppbench.report.compare.outcome.compare", raised)
    ended, shown = call(monkeypatch, capsys, "compare", "a", "b")
    assert (
        ended == code
        and sentence in shown.err
        and shown.err.count("\n") == bool(sentence)
        and "Traceback" not in shown.err
    )


@pytest.mark.parametrize(
    ("shell", "code", "err"),
    [
        ("{} list | head -n 1 >/dev/null; echo ${{PIPESTATUS[0]}} >&2", 0, rb"(0|141)\n"),
        ("{} list >/dev/full", 2, rb"ppbench: The output cannot be written \(No space left on device\); .*\n"),
        ("{} list >&-", 0, rb""),
        ("{} verify '' 2>&-", 2, rb""),
        ("LC_ALL=C PYTHONUTF8=0 PYTHONIOENCODING=ascii {} verify /nowhere-é", 2, rb"ppbench: .*nowhere-.*\n"),
    ],
)
def test_streams_that_are_closed_full_or_of_another_alphabet_are_no_traceback(shell, code, err):
    command = shell.format(f"{shlex.quote(sys.executable)} -m ppbench")
    done = subprocess.run(["bash", "-c", command], capture_output=True, check=False)
    assert done.returncode == code and re.fullmatch(err, done.stderr), done.stderr


def test_handlers_are_back_afterwards_and_what_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    mine = signal.getsignal(signal.SIGTERM)
    try:
        with stopping() as came:
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, "nohup"
            with pytest.raises(Stopped) as stopped:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(1)
            assert stopped.value.number == signal.SIGTERM and came == [signal.SIGTERM]
            assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL, "a second one ends at once"
        assert signal.getsignal(signal.SIGTERM) == mine
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_while_a_worker_starts_waits_and_is_not_lost():
    with stopping() as came, pytest.raises(Stopped):
        with held_back():
            os.kill(os.getpid(), signal.SIGINT)
            assert came == []
        time.sleep(1)
    assert came == [signal.SIGINT]


def children(process):
    """Return the processes of a session, which all that a command starts are of."""
    results = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(words[3]) == process and words[0] != "Z":
            results.append(int(path.parent.name))
    return results


def begun(words, log, context):
    """Begin a command in a session of its own, with what it says in a file: forked, so that nothing is imported, or
    as a program. Return its number and what waits for its code."""
    if context is None:
        program = subprocess.Popen(
            [sys.executable, "-m", "ppbench", *words], stdout=log, stderr=log, start_new_session=True
        )
        return program.pid, lambda: program.wait(20)

    def body():
        os.setsid()
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        sys.argv, sys.stdout, sys.stderr = ["ppbench", *words], open(1, "w"), open(2, "w")  # noqa: SIM115
        cli.main()

    process = context.Process(target=body)
    process.start()

    def ended():
        process.join(20)
        return process.exitcode

    return process.pid, ended


def until(true, seconds):
    """Wait until something is true; return whether it is."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="who is whose child is read from /proc")
@pytest.mark.parametrize(
    ("number", "workers", "program"),
    [(signal.SIGTERM, 2, True), (signal.SIGHUP, 2, False), (signal.SIGINT, 1, False)],
)
def test_a_signal_ends_an_evaluation_soon_and_leaves_no_process_and_no_word_of_python(
    tmp_path, forked, number, workers, program
):
    """At work where it is forked; the program is met while its first worker begins, which it waits for in the end.

    Forked workers would have the handler of SIGTERM of whoever forked them; those of a program have none.
    """
    out = tmp_path / "o"
    words = ["evaluate", "--defense", "dp", *TINY.split(), "--workers", str(workers), "--out", str(out)]
    with (tmp_path / "said").open("wb") as log:
        process, ended = begun(words, log, None if program else forked)
        least = 3 if program or workers > 1 else 1  # of a program one child keeps track of what is shared
        assert until(lambda: len(children(process)) >= least and out.exists(), 30)
        time.sleep(0.3)
        os.killpg(process, number)  # to all, as a terminal does
        code = ended()
    assert until(lambda: children(process) == [], 5)
    text = (tmp_path / "said").read_text()
    assert code == 128 + number, text
    assert "Traceback" not in text and "leaked" not in text and "Exception" not in text
    assert "what is finished is kept" in text


def test_every_code_is_told_and_every_command_tells_its_own():
    assert set(MEANINGS) == set(Exit)
    page = (Path(__file__).parents[1] / "docs" / "cli.md").read_text()
    assert all(f"| {code.value} | {meaning} |" in page for code, meaning in MEANINGS.items())
