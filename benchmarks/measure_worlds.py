"""How often the two-world test names lies, and accuses honest defenses: benchmarks/results/two_worlds.csv.

    PYTHONPATH=tests/lies python benchmarks/measure_worlds.py [SEEDS]

Each defense runs in the small federation of `ppbench.testing`, once per seed of all draws. Rows that are there already
are kept, so an interrupted run goes on. seconds: of the processor, the mean over seeds.
"""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import ppbench_channels as channels
import torch

from ppbench.adversary.two_worlds import world_report
from ppbench.base.registry import load_plugin, plugins
from ppbench.federation.contract import Defense
from ppbench.testing.small_federation import DefenseTrial

OUT = Path(__file__).parent / "results" / "two_worlds.csv"
FIELDS = ("kind", "defense", "seeds", "named", "explained", "first", "seconds")


def subjects() -> Iterator[tuple[str, Defense]]:
    """Yield each defense with its kind: what it lies about, or that it is honest."""
    for kind, classes in (
        ("lie about sums", channels.SUM_LIES),
        ("lie about noise", channels.NOISE_LIES),
        ("lie about replay", channels.REPLAY_LIES),
        ("honest twin", channels.TWINS),
    ):
        yield from ((kind, make()) for make in classes)
    for name, plugin in plugins("defenses").items():
        if plugin.ours:
            yield "ours", load_plugin("defenses", name)()


def row(kind: str, defense: Defense, seeds: int) -> list[object]:
    """Return a defense's row. named: seeds with a channel or a refusal; explained: with noise that its law explains."""
    named = explained = 0
    first, began = "", time.process_time()
    for seed in range(seeds):
        run = DefenseTrial(defense).federate(seed=seed)
        report = world_report(run, run.parties.server.params, 1)
        sentences = [channel.sentence for channel in report.channels] or [report.refusal]
        named += bool(sentences[0])
        explained += report.explained is True and not report.channels
        first = first or sentences[0]
    return [kind, defense.name, seeds, named, explained, first, f"{(time.process_time() - began) / seeds:.1f}"]


def main() -> None:
    """Measure what is not there yet."""
    torch.set_num_threads(1)
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    lines = OUT.read_text().splitlines() if OUT.exists() else []
    known = {line["defense"] for line in csv.DictReader(lines)}
    with OUT.open("a", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        if not known:
            table.writerow(FIELDS)
        for kind, defense in subjects():
            if defense.name not in known:
                table.writerow(row(kind, defense, seeds))
                file.flush()
                known.add(defense.name)


if __name__ == "__main__":
    main()
