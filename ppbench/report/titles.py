"""Evaluations, and the differences between keys, in words."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence

from ppbench.base.errors import count_of
from ppbench.records.schema import Scalar
from ppbench.report.frame import Key

ALONE = "evaluate/1"
"""The suite name of evaluations outside suites; left out of text."""


def evaluation_words(key: Key) -> str:
    """Return an evaluation in words."""
    fed = json.loads(key.federation)
    suite = "" if key.suite == ALONE else f"{key.suite}: "
    public = f", {key.public} public" if key.public else ""
    data = f"{suite}{key.data}, {key.train} examples{public}"
    parties, rounds = count_of(fed["clients"], "client"), count_of(fed["rounds"], "round")
    seed = "" if key.seed is None else f", seed {key.seed}"  # None: of all seeds
    words = f"{data}, {key.network}, {parties}, {rounds}{seed}"
    return " ".join(words.split())


def evaluation_titles(keys: Iterable[Key]) -> dict[Key, str]:
    """Return evaluations in words; equal texts get their differences appended."""
    words: dict[str, list[Key]] = {}
    for key in keys:
        words.setdefault(evaluation_words(key), []).append(key)
    titles: dict[Key, str] = {}
    for text, alike in words.items():
        more = key_differences(alike)
        for number, key in enumerate(sorted(alike, key=Key.text), start=1):
            other = more[key] or (f"the {number}. of {len(alike)} data sets or suites of these names")
            titles[key] = text if len(alike) == 1 else f"{text}, {other}"
    return titles


def key_differences(rows: Sequence[Key]) -> dict[Key, str]:
    """Return each key's values of the fields that differ, as "families=shared, seed 1"; "" where none do.

    Parameters are compared among the keys of one defense; defense and control value are left out.
    """
    seen: dict[tuple[str, str], set[Scalar]] = defaultdict(set)
    values_of = {key: _values(key) for key in rows}
    for some in values_of.values():
        for name, value in some.items():
            seen[name].add(value)
    return {
        key: ", ".join(_word(name[1], value) for name, value in some.items() if len(seen[name]) > 1)
        for key, some in values_of.items()
    }


def _values(key: Key) -> dict[tuple[str, str], Scalar]:
    """Return a key's values by (defense, name); by ("", name) those that all defenses have."""
    mine = {**json.loads(key.parameters), "version": key.version}
    shared = json.loads(key.federation) | ({} if key.seed is None else {"seed": key.seed})
    own = {(key.defense, name): value for name, value in mine.items()}
    return own | {("", name): str(v) if isinstance(v, list) else v for name, v in shared.items()}


def _word(name: str, value: Scalar) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"seed {text}" if name == "seed" else f"{name}={text}"
