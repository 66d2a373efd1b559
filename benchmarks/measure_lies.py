"""How often lies are believed and honest defenses accused: benchmarks/results/lies.json.

    python benchmarks/measure_lies.py OUT [--seeds 10] [--only NAME ...]

First the suites `tests/lies/*.toml` are swept with the portfolio of the default evaluation, seed after seed. A lie is
believed where the controls of its row's board hold, images are neither rebuilt nor recognizable, and no remark on
defense or attacks keeps the row from ranks (one round of training is too little for ranks by itself). Then come two
tests without attacks, in the small federation of `ppbench.testing`: that of two worlds, and the comparison of probes
with training; of lies, of honest defenses (`tests/honest.py`, the twins in `tests/lies`), and of all that are ours,
which evaluations take on trust, with the adapters that are installed. Records in OUT and entries of the file are kept,
so an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "lies"), str(ROOT / "tests")]  # their package must be seen as installed

import honest  # noqa: E402
import ppbench_channels as channels  # noqa: E402

from ppbench.adversary.two_worlds import world_flags  # noqa: E402
from ppbench.base.registry import load_plugin, plugins  # noqa: E402
from ppbench.federation.contract import Defense  # noqa: E402
from ppbench.records.schema import Record  # noqa: E402
from ppbench.report.controls import LAW_EXPLAINS, UNREPLAYED  # noqa: E402
from ppbench.report.entries import UNINFORMED  # noqa: E402
from ppbench.report.page.boards import boards_of, no_claims  # noqa: E402
from ppbench.run.detection import probe_flags  # noqa: E402
from ppbench.run.suite import load_suite  # noqa: E402
from ppbench.run.sweep import sweep  # noqa: E402
from ppbench.testing.small_federation import DefenseTrial, scene_victims  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "lies.json"
DOUBTED = {*UNINFORMED, "belied", UNREPLAYED}
"""Badges of rows whose defense, or whose attacks' knowledge of it, is not believed."""
SUITES, NOISE = ("channels", "lies"), "lie about noise"


@dataclass
class Tally:
    """What became of a defense. seeds: those that were tried; marked: of them those where a lie was believed, or an
    honest defense accused.

    reasons: how often which level, qualifier or flag spoke against it. seconds: of the processor, for the tests.
    """

    seeds: list[int] = field(default_factory=list)
    marked: list[int] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


def lies_of(name: str, folder: Path, seeds: range, only: list[str]) -> dict[str, Tally]:
    """Sweep a suite of lies, and return the tally of each defense of it: lies, and honest ones beside them."""
    suite = load_suite(ROOT / "tests" / "lies" / f"{name}.toml", "default")
    every = {config.defense for config in suite.configs}
    names = sorted(every & {*only} if only else every)
    records = list[Record]()
    for seed in seeds if names else ():
        records += sweep(suite, out=folder, engine="inline", only={"defense": names, "seed": [str(seed)]}).records
    return tallies_of(records)


def tallies_of(records: list[Record]) -> dict[str, Tally]:
    """Return the tallies of all defenses of some records but the controls."""
    tallies = dict[str, Tally]()
    for board in boards_of([*{record.cell_id: record for record in records}.values()], no_claims):
        for entry in board.entries:
            if entry.leak is not None and entry.role == "compared":
                tally, seed = tallies.setdefault(entry.defense.id, Tally()), entry.sample.config.seed
                reasons = [badge.text for badge in entry.badges if badge.text in DOUBTED]
                reasons += [entry.leak.level] if entry.leak.level in ("rebuilt", "recognizable") else []
                reasons += [] if board.reliable else ["controls fail"]
                tally.seeds.append(seed)
                tally.marked += [] if reasons else [seed]
                tally.reasons = dict(Counter(tally.reasons) + Counter(reasons))
    return tallies


def tested() -> Iterator[tuple[str, Defense]]:
    """Yield each defense of the tests without attacks, with its kind."""
    for kind, classes in (
        ("lie about sums", channels.SUM_LIES),
        (NOISE, channels.NOISE_LIES),
        ("lie about replay", channels.REPLAY_LIES),
        ("honest", honest.HONEST),
        ("honest twin", channels.TWINS[1:]),
    ):
        yield from ((kind, make()) for make in classes)
    for name, plugin in plugins("defenses").items():
        if plugin.ours:
            yield "ours", load_plugin("defenses", name)()


def tried(tally: Tally, kind: str, defense: Defense, seed: int) -> Tally:
    """Return a defense's tally with one more seed."""
    began = time.process_time()
    run = DefenseTrial(defense).federate(seed=seed)
    victims = scene_victims(run, batch=1).data
    flags = [*world_flags(run, run.parties.server.params, 1), *probe_flags(run, run.probe(victims), victims)]
    reasons = [f"{flag.code}: {flag.detail}" for flag in flags if flag.severity == "warning"]
    if kind == NOISE and not reasons and LAW_EXPLAINS not in {flag.code for flag in flags}:
        reasons = ["the law does not account for the noise"]
    return Tally(
        sorted([*tally.seeds, seed]),
        sorted([*tally.marked, *([seed] if bool(reasons) != kind.startswith("lie") else [])]),
        dict(Counter(tally.reasons) + Counter(reasons)),
        round(tally.seconds + time.process_time() - began, 1),
    )


def main() -> None:
    """Measure what is not there yet, and print the tallies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    torch.set_num_threads(1)
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in SUITES:
        tallies = lies_of(name, options.out / name, range(options.seeds), options.only)
        kept(known, name, tallies)
    for seed in range(options.seeds):
        for kind, defense in tested():
            tally = Tally(**known.get(kind, {}).get(defense.name, {}))
            if seed not in tally.seeds and (not options.only or defense.name in options.only):
                kept(known, kind, {defense.name: tried(tally, kind, defense, seed)})
    for kind, entries in known.items():
        for name, entry in entries.items():
            print(
                f"{kind:9} {name:22} {len(entry['seeds']):2} seeds, {len(entry['marked'])} marked; {entry['reasons']}"
            )


def kept(known: dict[str, dict[str, object]], kind: str, tallies: dict[str, Tally]) -> None:
    """Add tallies to those that are known, and write all."""
    known.setdefault(kind, {}).update({name: asdict(tally) for name, tally in tallies.items()})
    RESULTS.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
