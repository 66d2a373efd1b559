"""How long a page of many records takes: loading, rendering, memory; with `--browser`, opening and sorting in Chromium.

Records are made by hand: no attack runs. `synthetic` is used by tests/test_overview.py, too.

    python benchmarks/bench_page.py --records 10000 --folder /tmp/many
    python benchmarks/bench_page.py --records 500 --folder /tmp/some --browser
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import time
from collections.abc import Collection, Iterator
from functools import cache
from itertools import islice, product
from pathlib import Path

import numpy as np

from ppbench.metrics.intervals import Interval, clopper_pearson
from ppbench.questions.image_metrics import ImageScore
from ppbench.questions.labels import LabelScore
from ppbench.questions.membership import MemberScore
from ppbench.questions.tracing import TraceScore
from ppbench.records.figure import aggregate
from ppbench.records.schema import CellConfig, Metric, Record, Victim
from ppbench.records.store import Store

VALUES = (0.0001, 0.001, 0.01, 0.1, 0.5, 1.0)
SEEDS = (0, 1, 2)
DATA = ("digits", "mnist", "cifar10", "fashion_mnist", "kmnist", "svhn", "gtsrb", "pcam")
DEFENSES = ("dp", "dp_sgd", "ppdl", "spn", "pbpfl", "mpdp", "fedpc", "baffle", "soteria", "ats", "outpost")
CONTROLS = ("none", "full_noise")
# Attack, kind, whether it knows the defense, stage, batch size.
CELLS = (
    *(("dlg", "reconstruction", False, stage, batch) for stage, batch in (("init", 1), ("final", 1), ("init", 8))),
    *(("ig", "reconstruction", False, stage, batch) for stage, batch in (("init", 1), ("final", 1), ("init", 8))),
    *(("knowing", "reconstruction", True, stage, batch) for stage, batch in (("init", 1), ("final", 1), ("init", 8))),
    ("label_recovery", "label", False, "init", 8),
    ("mia_loss", "membership", False, "final", 1),
    ("mia_knowing", "membership", True, "final", 1),
    ("tracing", "tracing", False, "init", 1),
)
LEVELS, VARIANTS, VICTIMS = 11, 6, 24


def synthetic(count: int, kinds: Collection[str] = ()) -> Iterator[Record]:
    """Yield `count` records of several suites, seeds, defenses, control values and attacks; fewer when they run out.

    The controls come first in every suite and seed, so that any number of records gives boards that are ranked. kinds:
    of attacks; all by default.
    """
    settings = [(name, None) for name in CONTROLS] + list(product(DEFENSES, VALUES))
    cells = product(DATA, SEEDS, settings, [cell for cell in CELLS if not kinds or cell[1] in kinds])
    for data, seed, (defense, value), cell in islice(cells, count):
        yield _record(data, seed, defense, value, cell)


def _record(data: str, seed: int, defense: str, value: float | None, cell: tuple[str, str, bool, str, int]) -> Record:
    config = _config(data, seed, defense, value, cell)
    level = _level(defense, value, cell[2])
    victims, metrics = _scores(cell[1], level, int(config.cell_id()[:4], 16) % VARIANTS, seed)
    accuracy = 0.1 if defense == "full_noise" else round(0.9 - 0.2 * (value or 0.0), 3)
    ends = _interval(accuracy)
    return Record(
        cell_id=config.cell_id(),
        config=config,
        victims=list(victims),
        metrics=list(metrics),
        utility=_model(dict(accuracy=accuracy, low=ends.low, high=ends.high, n=1000), "utility"),
        cost=_model(dict(bytes_up=77752, bytes_down=77752, bytes_setup=80, memory_peak=10**6), "cost"),
        privacy=_model(dict(epsilon=None, delta=None, reason="the clip is off"), "privacy"),
        status="complete",
        environment=_model({}, "environment"),
    )


def _level(defense: str, value: float | None, knows: bool) -> int:
    """Return how much an attack finds, 0 to LEVELS - 1."""
    if value is None:
        return LEVELS - 1 if defense == "none" else 0
    fades = 0.2 * (4 + np.log10(value)) / (2 if knows else 1)
    return round((LEVELS - 1) * float(np.clip(1 - fades, 0, 1)))


@cache
def _interval(accuracy: float) -> Interval:
    return clopper_pearson(round(1000 * accuracy), 1000)


def _model(more: dict[str, object], which: str) -> dict[str, object]:
    defaults: dict[str, dict[str, object]] = {
        "utility": dict(chance=0.1, curve=[], reason=None),
        "cost": {},
        "privacy": {},
        "environment": dict(ppbench="0", python="3", torch="2", device="x86_64", threads=1, dtype="float32"),
    }
    return defaults[which] | more


def _config(
    data: str, seed: int, defense: str, value: float | None, cell: tuple[str, str, bool, str, int]
) -> CellConfig:
    attack, kind, knows, stage, batch = cell
    control = None if value is None else dict(name="strength", value=value)
    return CellConfig.model_validate(
        dict(
            suite=f"{data}-synthetic/1",
            threat_model=dict(
                id="client/1" if kind == "membership" else "server/1", sees="what it is sent", knows_defense=knows
            ),
            defense=dict(id=defense, version="1", control=control,
                         parameters={} if value is None else {"strength": value}),
            attack=dict(id=attack, version="1", kind=kind, parameters={}, adaptive=knows,
                        follows="dlg" if kind == "tracing" else None),
            federation=dict(clients=10, rounds=20, schedule="parallel", upload="gradient", local_epochs=1, batch=32,
                            optimizer="sgd", lr=0.1, momentum=0.0, decay_at=[], decay=1.0, partition="iid",
                            server_optimizer="sgd", server_lr=0.1, backend="loop", device="cpu", dtype="float32"),
            data=dict(name=data, sha256="0" * 64, train=1000, test=500),
            model=dict(id="dlnet", options={}, shape=[1, 8, 8], classes=10, parameters=250, loss="cross_entropy"),
            stage=stage, batch_size=batch, victims=VICTIMS, seed=seed,
        )
    )  # fmt: skip


@cache
def _scores(kind: str, level: int, variant: int, seed: int) -> tuple[tuple[Victim, ...], tuple[Metric, ...]]:
    """Return made-up scores and their metrics; shared by many cells, because bootstraps take their time."""
    rng = np.random.default_rng([level, variant, len(kind)])
    share = level / (LEVELS - 1)
    victims: list[Victim]
    if kind == "reconstruction":
        db = np.clip(6 + 34 * share + rng.normal(0, 3, VICTIMS), 1, 60).round(3)
        victims = [
            ImageScore(probe=i, client=0, index=0, psnr=v, rmse=10 ** (-v / 20) * 2, rmse_raw=10 ** (-v / 20) * 2,
                       ssim=min(v / 50, 1), label=bool(rng.random() < share), confidence=0.01, at_truth=1e-12,
                       evaluations=500, ratio=10 ** (3 * (1 - share)) - 1, blind=9.0, oracle=v, mse=10 ** (-v / 10),
                       path=[(10, v / 3), (100, v / 2), (500, v)])
            for i, v in enumerate(db.tolist())
        ]  # fmt: skip
    elif kind == "label":
        victims = [LabelScore(probe=i, client=0, index=0, label=bool(rng.random() < share)) for i in range(VICTIMS)]
    elif kind == "tracing":
        owners = range(VICTIMS)
        victims = [TraceScore(index=i, owner=i % 10, guess=i % 10 if rng.random() < share else 3) for i in owners]
    else:
        scores = rng.normal(0, 1, 200) + 2 * share * (np.arange(200) % 2)
        victims = [
            MemberScore(index=i, half=i // 100, member=bool(i % 2), score=float(s.round(4)), decision=bool(s > share))
            for i, s in enumerate(scores)
        ]
    return tuple(victims), tuple(aggregate(victims, classes=10, seed=seed))


def main() -> None:
    """Write the records once, then measure in this process; one line of JSON on the screen."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--records", type=int, default=10_000)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--browser", action="store_true", help="also open and sort the page in Chromium")
    args = parser.parse_args()
    store = Store(args.folder)
    if len(store.ids()) < args.records:
        from ppbench.records.store import canonical_json

        store.prepare()
        for record in synthetic(args.records):  # `Store.save` syncs every file to the disk
            (store.folder / f"{record.cell_id}.json").write_bytes(canonical_json(record))
    print(json.dumps(measured(store)))
    if args.browser:
        print(json.dumps(opened(store.html_path)))


def measured(store: Store) -> dict[str, float]:
    """Return CPU seconds of loading and of rendering, the page's megabytes and the process's peak memory in megabytes.

    The page is left in the folder, without its tables and figures.
    """
    from ppbench.report.page.html import Page

    start = time.process_time()
    records = store.load_all()
    loaded = time.process_time()
    at_load = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    page = Page(records, images=store.images).html()
    done = time.process_time()
    store.html_path.write_text(page, encoding="utf-8")
    return dict(
        records=len(records),
        load_s=round(loaded - start, 2),
        render_s=round(done - loaded, 2),
        page_mb=round(len(page.encode()) / 1e6, 2),
        peak_loaded_mb=round(at_load),
        peak_mb=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    )


def opened(path: Path) -> dict[str, float]:
    """Return seconds until a page stands in Chromium, until its table of all cells does, and until that is sorted."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as running:
        chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        browser = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.set_default_timeout(120_000)
        start = time.perf_counter()
        page.goto(path.resolve().as_uri())
        stands = time.perf_counter()
        page.evaluate("location.hash = '#cells'")
        page.wait_for_selector("#cells .tabulator-row")
        drawn = time.perf_counter()
        page.locator("#cells [role=columnheader] button", has_text="Accuracy").click()
        page.wait_for_selector("#cells [aria-sort=ascending]")
        done = time.perf_counter()
        browser.close()
    return dict(open_s=round(stands - start, 2), all_cells_s=round(drawn - stands, 2), sort_s=round(done - drawn, 2))


if __name__ == "__main__":
    main()
