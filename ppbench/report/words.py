"""Words that sentences, tables and claims share: on figures, attacks, control values and evaluations."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ppbench.base.errors import count_of
from ppbench.records.figure import Figured, grouped
from ppbench.records.schema import Record, Scalar, Utility
from ppbench.report.frame import Key
from ppbench.report.learning import is_usable

# -- Figures, attacks and control values --


@dataclass(frozen=True)
class StageWords:
    """The attacked model in words. when: in a sentence; weights: of uploads, in a title; model: in a column."""

    when: str
    weights: str
    model: str


STAGES = {
    "init": StageWords("before training", "initial weights", "initial"),
    "iterate": StageWords("of what clients train on", "the weights that clients train on", "trained on"),
    "final": StageWords("after training", "trained weights", "delivered"),
    "audit": StageWords("after a training with canaries", "audited weights", "audited"),
}
"""By stage, in the order of training."""
STAGE_ORDER = tuple(STAGES)


def setting_labels(records: Sequence[Record]) -> dict[str, str]:
    """Return by cell id "alpha2=0.1": the control parameter, what else differs among a defense's records, the role."""
    parameters = [{**record.config.defense.parameters, "version": record.config.edition} for record in records]
    named = [
        {(record.config.defense.id, name): parameter for name, parameter in own.items()}
        for record, own in zip(records, parameters, strict=True)
    ]
    labels = {}
    for record, differing in zip(records, _differing(named), strict=True):
        control = record.config.defense.control
        words = [] if control is None else [f"{control.name}={control.value:g}"]
        words += [f"{name}={v}" for (_, name), v in differing.items() if control is None or name != control.name]
        words += [f"({record.config.role})"] if record.config.role else []
        labels[record.cell_id] = " ".join(words)
    return labels


def figure_text(record: Figured | None, name: str, form: str, unit: str = "", scale: float = 1.0) -> str:
    """Return "35.2 dB [31.0, 40.3]" for a metric, "71.0% [66.2, 75.4]" with the form ".1%", "-" where there is none.

    scale: a factor on the metric, from its unit to another one.
    """
    metric = record.metric(name) if record is not None else None
    if metric is None or metric.value is None:
        return "-"
    text = f"{scale * metric.value:{form}}{unit}"
    if metric.low is not None and metric.high is not None:
        text += f" [{scale * metric.low:{form}}, {scale * metric.high:{form}}]".replace("%", "")
    return text


def decibels(record: Figured | None) -> str:
    """Return a median PSNR with its interval."""
    return figure_text(record, "psnr_median", ".1f", " dB")


def capitalized(text: str) -> str:
    """Return a sentence with a capital first letter."""
    return text[:1].upper() + text[1:]


def attack_at(attack: str, control: str) -> str:
    """Return an attack with the control value, as "dlg, sigma=0.1"."""
    return f"{attack}, {control}" if control else attack


def listed_values(labels: Sequence[str]) -> str:
    """Return "kappa=1, 10 and 100": control values of one defense in words, with their common name once."""
    names = {label.partition("=")[0] for label in labels}
    plain = all("=" in label and " " not in label for label in labels)
    words = [label.partition("=")[2] for label in labels] if plain and len(names) == 1 else list(labels)
    text = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    return f"{names.pop()}={text}" if plain and len(names) == 1 else text


def utility_text(utility: Utility, undefended: Utility | None) -> str:
    """Return "accuracy 50.0% (96.1% undefended), not usable", "MSE 0.059" for numbers, or "training diverged".

    Of texts that are their own targets "accuracy 50.0% of next tokens (54.2% undefended)".
    """
    unusable = undefended is not None and is_usable([utility], [undefended]) is False
    for word, field, form in (("accuracy", "accuracy", ".1%"), ("MSE", "mse", ".3g")):
        value, beside = (None if u is None else getattr(u, field) for u in (utility, undefended))
        if value is not None:
            mark = (f", {utility.collapse}" if utility.collapse else "") + (", not usable" if unusable else "")
            return (
                f"{word} {value:{form}}{utility.counted}"
                + (f" ({beside:{form}} undefended)" if beside is not None else "")
                + mark
            )
    return "training diverged"


# -- Evaluations, and the differences between keys --

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
    titles: dict[Key, str] = {}
    for text, alike in grouped(keys, evaluation_words).items():
        more = key_differences(alike)
        for number, key in enumerate(sorted(alike, key=Key.text), start=1):
            other = more[key] or (f"the {number}. of {len(alike)} data sets or suites of these names")
            titles[key] = text if len(alike) == 1 else f"{text}, {other}"
    return titles


def key_differences(rows: Sequence[Key]) -> dict[Key, str]:
    """Return each key's values of the fields that differ, as "families=shared, seed 1"; "" where none do.

    Parameters are compared among the keys of one defense; defense and control value are left out.
    """
    differing = zip(rows, _differing([_values(key) for key in rows]), strict=True)
    return {key: ", ".join(_word(name, value) for (_, name), value in some.items()) for key, some in differing}


def _differing(rows: Sequence[dict[tuple[str, str], Scalar]]) -> list[dict[tuple[str, str], Scalar]]:
    """Return each row without the names whose value is the same in all rows."""
    seen: dict[tuple[str, str], set[Scalar]] = defaultdict(set)
    for row in rows:
        for name, value in row.items():
            seen[name].add(value)
    return [{name: value for name, value in row.items() if len(seen[name]) > 1} for row in rows]


def _values(key: Key) -> dict[tuple[str, str], Scalar]:
    """Return a key's values by (defense, name); by ("", name) those that all defenses have."""
    mine = {**json.loads(key.parameters), "version": key.version}
    shared = json.loads(key.federation) | ({} if key.seed is None else {"seed": key.seed})
    own = {(key.defense, name): value for name, value in mine.items()}
    return own | {("", name): str(v) if isinstance(v, list) else v for name, v in shared.items()}


def _word(name: str, value: Scalar) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"seed {text}" if name == "seed" else f"{name}={text}"
