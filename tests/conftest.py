"""Which tests run, and where. Fixtures (shared_fixtures.py) take seconds to import: only who runs tests waits."""

import gc
import os
import sys
from collections import defaultdict
from importlib import import_module


# -- batteries: many cases, of which a usual run asks enough ----------------------------------------------------------
def pytest_addoption(parser):
    parser.addoption(
        "--battery", choices=("few", "whole"), default="few",
        help="ask the batteries' cases until every one of their values was met, or the whole of them",
    )  # fmt: skip


def pytest_configure(config):
    # Tests start the command a hundred times; without compiled files each would compile the package anew.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    config.addinivalue_line("markers", "battery(*values): a case of a battery, known by these values, one of each axis")
    config.addinivalue_line("markers", "nightly: long and rarely fails; runs by --battery=whole, or where it is named")
    if os.environ.get("PYTEST_XDIST_WORKER") == "gw1":  # compiles it in a fresh installation, while gw0 compiles torch
        import_module("seaborn")
    if config.getoption("dist", "no") == "no":  # else this process hands tests out and runs none
        config.pluginmanager.import_plugin("shared_fixtures")
        set_examples(100 if config.getoption("--battery") == "whole" else 25)


def set_examples(count):
    """Let hypothesis draw the same `count` examples in every run, where a test does not say how many."""
    from hypothesis import settings

    settings.register_profile("the same in every run", derandomize=True, deadline=None, max_examples=count)
    settings.load_profile("the same in every run")


def covering(cases):
    """Return places of cases, in order, that hold every value of each axis that any case holds: greedily, the rarest
    value first, by the case with the most values yet unmet, so that the choice is the same in every process."""
    values = [set(enumerate(case)) for case in cases]
    holders = defaultdict(list)
    for place, case in enumerate(cases):
        for value in enumerate(case):
            holders[value].append(place)
    chosen, met = set(), set()
    for value in sorted(holders, key=lambda value: len(holders[value])):
        if value not in met:
            best = max(holders[value], key=lambda place: len(values[place] - met))
            chosen.add(best)
            met |= values[best]
    return sorted(chosen)


def pytest_collection_finish(session):
    """Hide what is imported and collected from the garbage collector, which would spend a tenth of the time on it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def pytest_collection_modifyitems(config, items):
    """Leave out what a battery need not ask, unless the whole is wanted or cases are chosen by name."""
    if config.getoption("--battery") == "whole" or config.option.keyword:
        return
    if not any(".py" in arg for arg in config.args):
        late = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=late)
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
    if any("[" in arg for arg in config.args):
        return
    batteries = defaultdict(list)
    for item in items:
        if mark := item.get_closest_marker("battery"):
            batteries[item.nodeid.partition("[")[0]].append((item, mark.args))
    left = set()
    for cases in batteries.values():
        kept = set(covering([values for _, values in cases]))
        left |= {item for place, (item, _) in enumerate(cases) if place not in kept}
    config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = [item for item in items if item not in left]
