"""The pytest plugin: a defense is swept over a suite, and a test fails when its worst case breaks a limit.

    @pytest.mark.ppbench(suite="digits-quick", defense="my_defense", max_asr=0.6, max_psnr=20)
    def test_my_defense(ppbench):
        assert ppbench.compare().exit_code == 0

Importing this module costs pytest nothing: whatever is heavy is imported by the first marked test.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ppbench.base.errors import ProtocolError, UsageError

if TYPE_CHECKING:
    from ppbench.testing.sweeps import Request, Results

_RESULTS: pytest.StashKey[dict[Request, Results]] = pytest.StashKey()
_NAME = "ppbench"


class PpbenchUndecided(UserWarning):
    """A limit was met, but lies within the interval of the figure: it may be chance."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the plugin's options."""
    group = parser.getgroup(_NAME, "privacy attacks on federated-learning defenses")
    group.addoption("--ppbench-out", metavar="DIR", help="keep results of sweeps in DIR, not in pytest's cache")
    group.addoption("--ppbench-baseline", metavar="DIR", help="accepted results that `ppbench.compare()` compares with")
    group.addoption("--ppbench-workers", metavar="N", type=int, help="processes of a sweep; one per core by default")
    parser.addini("ppbench_baseline", "folder of accepted results, relative to the root of the tests", default="")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers",
        "ppbench(defense, suite='digits-quick', preset='', only={}, at=None, max_asr=None, max_psnr=None, "
        "max_labels=None, min_cap=None): sweep the defense over the suite; the test fails where its worst case breaks "
        "a limit, and as a harness fault where a control does.",
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    """Add the fixture to every marked test."""
    names: list[str] | None = getattr(item, "fixturenames", None)
    if names is not None and _NAME not in names and item.get_closest_marker(_NAME) is not None:
        names.append(_NAME)


@pytest.fixture
def ppbench(request: pytest.FixtureRequest) -> Results:
    """The swept suite of the test's `ppbench` marker: records, worst figures, and `compare`."""
    marker = request.node.get_closest_marker(_NAME)
    if marker is None:
        pytest.fail("the fixture ppbench needs its marker, as @pytest.mark.ppbench(defense='dp')", pytrace=False)
    from ppbench.base.fence import guard

    try:
        with guard():
            return _ppbench(request.config, request.path.parent, marker)
    except (UsageError, ProtocolError) as error:
        sentence = str(error)
    pytest.fail(sentence, pytrace=False)  # outside of `except`, or pytest shows the sentence twice


def _ppbench(config: pytest.Config, beside: Path, marker: pytest.Mark) -> Results:
    """Return the results of a marker's sweep; each sweep runs once per session."""
    from ppbench.testing.sweeps import request_from, run_sweep

    if marker.args:
        first = marker.args[0]
        raise UsageError(f"pytest.mark.ppbench takes keywords only, not {first!r}; name it, as defense={first!r}.")
    options = dict(marker.kwargs)
    suite = str(options.get("suite", ""))
    if suite.endswith(".toml"):
        options["suite"] = str(beside / suite if (beside / suite).is_file() else config.rootpath / suite)
    request = request_from(options)
    known = config.stash.setdefault(_RESULTS, {})
    if request not in known:
        results = run_sweep(request, _home(config), config.getoption("--ppbench-workers"))
        known[request] = replace(results, baseline=_baseline(config))
    return known[request]


def _home(config: pytest.Config) -> Path:
    """Return the folder of results: --ppbench-out, else one in pytest's cache, else a temporary one."""
    folder = config.getoption("--ppbench-out")
    if folder is not None:
        return Path(folder)
    cache = getattr(config, "cache", None)
    if cache is not None:
        return Path(cache.mkdir(_NAME))
    import tempfile

    return Path(tempfile.mkdtemp(prefix="ppbench-"))


def _baseline(config: pytest.Config) -> Path | None:
    option = config.getoption("--ppbench-baseline")
    if option:
        return Path(option)
    setting = config.getini("ppbench_baseline")
    return config.rootpath / setting if setting else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Judge the marker's limits before the test's own body runs."""
    results: Results | None = getattr(item, "funcargs", {}).get(_NAME)
    if results is None or item.get_closest_marker(_NAME) is None:
        return
    for name, worst in results.worst.items():
        item.user_properties.append((f"ppbench_{name}", str(worst)))  # JUnit XML shows them
    if fault := results.fault():
        pytest.fail(f"{fault} (results: {results.out})", pytrace=False)
    if failures := results.failures():
        text = "".join(f"\n- {sentence}" for sentence in failures)
        pytest.fail(
            f"defense {results.request.defense!r} ({results.swept.suite.name}):{text}\nresults: {results.out}",
            pytrace=False,
        )
    for sentence in results.doubts():
        warnings.warn(PpbenchUndecided(sentence), stacklevel=1)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print where the results are."""
    for results in config.stash.get(_RESULTS, {}).values():
        swept = results.swept
        terminalreporter.write_line(
            f"ppbench: {swept.suite.name}, {results.request.defense}: {len(swept.records)} cells, {swept.computed} "
            f"computed now, in {results.out}"
        )
