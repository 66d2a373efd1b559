"""The pytest plugin: a marked test sweeps a suite once, and fails by its limits or as a harness fault."""

import re
import shutil
from importlib import metadata
from statistics import fmean
from unittest.mock import patch

import pytest
import torch._dynamo  # noqa: F401 - what a test run in this process imports first, it forgets; this cannot come twice

import ppbench.report.compare.outcome
import ppbench.run.sweep  # noqa: F401 - likewise
from ppbench.base import registry
from ppbench.base.errors import UsageError
from ppbench.records.sources import source_digest
from ppbench.testing.sweeps import Worst, _forget, judge_limit, request_from, run_sweep, worst_figures

pytest_plugins = ["pytester"]
SUITE = """
schema = "ppbench.run.suite/1"
id = "tiny"
version = 1
title = "in seconds"
[task]
dataset = "digits"
model = "mlp"
clients = 2
train = 120
[federation]
rounds = 1
[questions]
attacks = ["analytic", "label_recovery", "mia_loss"]
attack_batch = [1]
victims = 3
candidates = 60
stages = ["init", "final"]
threats = ["server/1"]
[[defense]]
id = "dp"
grid = [0, 10]
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return the folder in which all tests here find the sweep that the first one makes."""
    return tmp_path_factory.mktemp("sweeps")


@pytest.fixture
def tried(pytester, home, monkeypatch):
    """Return a runner of tests, given as source, that keeps sweeps in `home`."""

    def start(source, *options):
        (pytester.path / "tiny.toml").write_text(SUITE)
        pytester.makepyfile("import pytest\n" + source)
        kept = (f"--ppbench-out={home}", "--ppbench-workers=1")  # with a space pytest takes them for tests
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        # The session that runs this test may have loaded the plugin by itself: that it cannot be rewritten is no news.
        quiet = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
        own = ("-p", "ppbench.testing.pytest_plugin", "-p", "no:cacheprovider", "-rA")
        return pytester.runpytest_inprocess(*own, *quiet, *kept, *options)

    return start


def marked(arguments, body="pass"):
    return f"@pytest.mark.ppbench(suite='tiny.toml', defense='dp', {arguments})\ndef test_it(ppbench):\n    {body}\n"


def test_limits_that_hold_pass_and_doubt_is_a_warning(tried):
    body = "assert set(ppbench.worst) == {'asr', 'psnr', 'labels', 'cap'}; assert any(ppbench.out.glob('*.html'))"
    certain = tried(marked("max_asr=1", f"{body}; print('found', ppbench.worst['asr'])"))
    certain.assert_outcomes(passed=1)
    (values,) = re.findall(r"found ([\d.]+) \[[\d.]+, ([\d.]+)\]", certain.stdout.str())
    limit = f"max_asr={fmean(map(float, values)):.3f}"
    result = tried(marked(limit, body))
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines([f"*PpbenchUndecided: the worst asr*within {limit}; undecided*"])
    result.stdout.fnmatch_lines(["ppbench: tiny/1, dp: 20 cells, *"])


def test_a_limit_that_breaks_fails_the_test_before_its_body(tried, tmp_path):
    xml = tmp_path / "found.xml"
    result = tried(marked("max_psnr=20, max_labels=0.9, min_cap=0.5", "raise SystemExit"), f"--junit-xml={xml}")
    result.assert_outcomes(failed=1)
    lines = [f"*- the worst {name}*breaks {limit}*" for name, limit in
             (("psnr", "max_psnr=20"), ("labels", "max_labels=0.9"), ("cap", "min_cap=0.5"))]  # fmt: skip
    result.stdout.fnmatch_lines(lines)
    assert 'name="ppbench_psnr"' in xml.read_text()
    tried(marked("max_psnr=20").replace("(ppbench)", "()")).assert_outcomes(failed=1)  # nor need it ask for the fixture


@pytest.mark.parametrize(
    ("arguments", "body", "outcome", "line"),
    [
        ("only={'kind': ['membership']}, max_asr=0.9", "pass", "failed",  # one round: nobody's members are found
         "*harness fault, no fault of 'dp': *is NOT shown to find members*"),
        ("only={'kind': ['reconstruction', 'label']}, max_asr=0.9", "pass", "failed",
         "*max_asr=0.9 was requested, but no finished cell has such a figure*"),
        ("at=10", "ppbench.compare()", "skipped", "*no baseline to compare with; give --ppbench-baseline DIR*"),
    ],
)  # fmt: skip
def test_what_says_nothing_of_the_defense_is_told_as_such(tried, arguments, body, outcome, line):
    result = tried(marked(arguments, body))
    result.assert_outcomes(**{outcome: 1})
    result.stdout.fnmatch_lines([line])
    assert "breaks" not in result.stdout.str()


def test_a_baseline_is_compared_with(tried, home, tmp_path, pytester):
    tried(marked("")).assert_outcomes(passed=1)
    (out,) = home.iterdir()
    shutil.copytree(out, tmp_path / "accepted")
    source = marked("", "found = ppbench.compare(); assert found.exit_code == 0 and found.rows")
    tried(source, f"--ppbench-baseline={tmp_path / 'accepted'}").assert_outcomes(passed=1)
    pytester.makeini(f"[pytest]\nppbench_baseline = {tmp_path / 'accepted'}\n")
    tried(source).assert_outcomes(passed=1)
    tried(source, "--ppbench-baseline=nowhere").assert_outcomes(failed=1)


def test_cells_that_filters_leave_out_are_not_missed(home, tmp_path):
    suite = tmp_path / "tiny.toml"
    suite.write_text(SUITE)
    (full,) = home.iterdir()
    with pytest.raises(UsageError, match="no defense named 'nobodys'"):
        run_sweep(request_from({"defense": "nobodys"}), tmp_path / "new")
    assert not (tmp_path / "new").exists(), "refused before anything runs"
    part = run_sweep(
        request_from({"suite": str(suite), "defense": "dp", "only": {"stage": ["init"]}}), tmp_path / "new", 1
    )
    assert part.compare(full).exit_code == 0
    (part.out / "records" / f"{part.records[0].cell_id}.json").unlink()
    assert part.compare(full).exit_code == 4


@pytest.mark.parametrize(
    ("marker", "words"),
    [
        ("defense='dp', max_ars=0.6", "no argument of pytest.mark.ppbench named 'max_ars'; did you mean 'max_asr'"),
        ("defense='dpp'", "no defense named 'dpp'; did you mean 'dp'"),
        ("max_asr=0.6", "names no defense"),
        ("'dp'", "takes keywords only"),
        ("defense='dp', max_asr='low'", "max_asr='low' cannot be used; give a number"),
        ("defense='dp', only={'defense': ['spn']}", "cannot be used; give filters as"),
        ("defense='dp', suite='digit-quick'", "no suite named 'digit-quick'; did you mean 'digits-quick'"),
        ("defense='dp', suite='tiny.toml', at=7", "at=7 is no control value of 'dp'"),
    ],
)
def test_a_wrong_marker_is_an_error_in_one_sentence(tried, marker, words):
    result = tried(f"@pytest.mark.ppbench({marker})\ndef test_it():\n    pass\n")
    result.assert_outcomes(errors=1)
    assert words in result.stdout.str() and "Traceback" not in result.stdout.str()


def test_the_marker_is_registered_and_its_fixture_needs_it(tried):
    tried("def test_it():\n    pass\n", "--strict-markers").assert_outcomes(passed=1)
    tried("def test_it(ppbench):\n    pass\n").stdout.fnmatch_lines(["*the fixture ppbench needs its marker*"])


def test_the_digest_follows_the_sources_of_plugins(tmp_path, monkeypatch):
    package = tmp_path / "somebody" / "deep"
    package.mkdir(parents=True)
    (tmp_path / "somebody" / "__init__.py").touch()
    (package / "mine.py").write_text("scale = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    alone = source_digest()
    entry = metadata.EntryPoint("mine", "somebody.deep.mine:Mine", "ppbench.defenses")
    plugin = registry.Plugin("defenses", "mine", entry.value, "somebody", entry)
    with patch.dict(registry.plugins("defenses"), {"mine": plugin}):
        first = source_digest()
        (package / "mine.py").write_text("scale = 2\n")
        second = source_digest()
    assert len({alone, first, second}) == 3 and source_digest() == alone
    assert source_digest((package / "mine.py",)) != alone


def test_results_of_older_code_are_deleted_and_nothing_else(tmp_path):
    names = ("s-" + "a" * 12, "s-" + "b" * 12, "s-x-" + "c" * 12, "s-" + "d" * 12)
    now, old, other, strange = (tmp_path / name for name in names)
    for folder in (now, old, other, strange):
        folder.mkdir()
        if folder != strange:
            (folder / "ppbench.json").touch()
    _forget(tmp_path, "s-", now)
    assert not old.exists() and all(folder.exists() for folder in (now, other, strange))


@pytest.mark.parametrize(
    ("figure", "ends", "kept", "sure"),
    [
        ("asr", (0.5, 0.4, 0.59), True, True),
        ("asr", (0.5, 0.4, 0.61), True, False),
        ("asr", (0.61, 0.5, 0.7), False, False),
        ("asr", (0.7, 0.65, 0.8), False, True),
        ("asr", (0.6, None, None), True, False),
        ("cap", (0.7, 0.65, 0.8), True, True),
        ("cap", (0.5, 0.4, 0.7), False, False),
        ("cap", None, False, False),
    ],
)
def test_the_figure_itself_decides_and_its_interval_says_how_surely(figure, ends, kept, sure):
    result = judge_limit(figure, 0.6, ends and Worst(*ends, ""))
    assert (result.kept, result.sure) == (kept, sure)
    assert ("undecided" in result.sentence) == (ends is not None and not sure)


def test_worst_figures_are_over_attacks_and_control_values(fabricate):
    images = [(0.1, "dlg", 30, 0.1), (0.1, "ig", 20, 0.2), (1.0, "dlg", 5, 0.8), (1.0, "ig", 8, 0.6)]
    cells = [fabricate("dp", v, a, "reconstruction", db, error=e, control="sigma") for v, a, db, e in images]
    cells += [fabricate("dp", v, "mia_loss", "membership", 0.5 + v / 10, control="sigma") for v in (0.1, 1.0)]
    result, there = worst_figures(cells), worst_figures(cells, at=1.0)
    assert (result["psnr"].value, there["psnr"].value) == (31, 9)
    assert "dlg, sigma=0.1, init" in result["psnr"].where and "ig, sigma=1" in there["psnr"].where
    assert result["cap"].value == there["cap"].value == pytest.approx(0.95 * (0.1 + 0.6) / 2)
    assert result["asr"].value == there["asr"].value == pytest.approx(0.6)
    assert "labels" not in result
