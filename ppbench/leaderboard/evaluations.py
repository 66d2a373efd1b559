"""Records by the evaluation that they are of: suite, data, network, federation and seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ppbench.controls import CONTROLS
from ppbench.leaderboard.boards import network
from ppbench.records.schema import Record
from ppbench.verdict import sentences

ALONE = "evaluate/1"
"""The suite of an evaluation that nobody's suite asked for; not worth a word."""


def evaluations(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Return the records by suite, data, network, federation and seed, which a key's first line says."""
    found: dict[str, list[Record]] = {}
    for record in records:
        config = record.config
        model, fed = network(config.model.id, config.model.options), config.federation
        suite = "" if config.suite == ALONE else f"{config.suite}: "
        data = f"{suite}{config.data.name}, {config.data.train} examples"
        about = f"{data}, {model}, {fed.clients} clients, {fed.rounds} rounds, seed {config.seed}"
        about = " ".join(about.split())
        parts = (config.data, config.model, config.federation)
        found.setdefault("\n".join([about, *(part.model_dump_json() for part in parts)]), []).append(record)
    return found


@dataclass(frozen=True)
class Said:
    """A sentence on a defense. about: the evaluation that it is of, "" where there is one only."""

    defense: str
    about: str
    sentence: str


def said(records: Sequence[Record]) -> list[Said]:
    """Return what was found in each evaluation about each defense, sentence by sentence."""
    groups, found = evaluations(records), list[Said]()
    for key, some in groups.items():
        about = key.partition("\n")[0] if len(groups) > 1 else ""
        for defense in sorted({r.config.defense.id for r in some} - set(CONTROLS)):
            found += [Said(defense, about, sentence) for sentence in sentences(defense, some)]
    return found
