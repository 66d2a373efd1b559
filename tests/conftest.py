"""Which tests run, and where. Fixtures (shared_fixtures.py) take seconds to import: only who runs tests waits."""

import gc
from collections import defaultdict
from itertools import combinations


# -- batteries: many cases, of which a usual run asks enough ----------------------------------------------------------
def pytest_addoption(parser):
    parser.addoption(
        "--battery", choices=("pairs", "whole"), default="pairs",
        help="ask the batteries' cases until every pair of their values was met, or the whole of them",
    )  # fmt: skip


def pytest_configure(config):
    config.addinivalue_line("markers", "battery(*values): a case of a battery, known by these values, one of each axis")
    config.addinivalue_line("markers", "nightly: long and rarely fails; runs by --battery=whole, or where it is named")
    if config.getoption("dist", "no") == "no":  # else this process hands tests out and runs none
        config.pluginmanager.import_plugin("shared_fixtures")


def covering(cases):
    """Return places of cases, in order, that hold every pair of values of two axes that any case holds: greedily, the
    rarest pair first, by the case with the most pairs yet unmet, so that the choice is the same in every process."""
    pairs = [list(combinations(enumerate(case), 2)) for case in cases]
    holders = defaultdict(list)
    for place, kept in enumerate(pairs):
        for pair in kept:
            holders[pair].append(place)
    chosen, met = set(), set()
    for pair in sorted(holders, key=lambda pair: len(holders[pair])):
        if pair not in met:
            best = max(holders[pair], key=lambda place: sum(other not in met for other in pairs[place]))
            chosen.add(best)
            met.update(pairs[best])
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
