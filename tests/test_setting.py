"""One judgment of a setting: page, terminal, JSON, tables and sentences say the same."""

from html import unescape

import numpy as np
import pytest

from ppbench.commands.terminal import glance
from ppbench.questions.membership import BatchScore
from ppbench.records.schema import Flag
from ppbench.report.controls import Check
from ppbench.report.page.boards import worst_rows
from ppbench.report.page.evaluations import defense_sentences, judged_evaluations
from ppbench.report.page.headline import answer_of
from ppbench.report.page.html import Page

HOLDS = Check("harness", True, "The harness passes.")
BLIND = "no better than blind"


def controls(make, **about):
    return [
        make("none", None, "dlg", "reconstruction", 35.0, **about),
        make("none", None, "adaptive_dp", "reconstruction", 35.0, adaptive=True, **about),
        make("full_noise", None, "dlg", "reconstruction", 6.0, **about),
    ]


def dp(make, value, decibels, accuracy=0.94, **about):
    about = dict(control="sigma", accuracy=accuracy, n=40) | about
    return [
        make("dp", value, "dlg", "reconstruction", decibels - 1, **about),
        make("dp", value, "adaptive_dp", "reconstruction", decibels, adaptive=True, **about),
    ]


def one(make, attack, kind, share=0.5, value=0.1, **about):
    """Return one more cell of dp."""
    return make("dp", value, attack, kind, share, **dict(control="sigma", accuracy=0.94) | about)


def changed(record, **changes):
    """Return the record with changed parts of its configuration: seed=1, attack={"follows": "ig"}."""
    config = record.config
    for name, value in changes.items():
        part = getattr(config, name).model_copy(update=value) if isinstance(value, dict) else value
        config = config.model_copy(update={name: part})
    return record.model_copy(update={"config": config, "cell_id": config.cell_id()})


def flagged(record):
    flag = Flag(code="own_account", severity="error", detail="its server reads something else")
    return record.model_copy(update={"flags": [flag]})


def batch_scores(share, n=40):
    right = np.arange(n) // 4 < round(share * n / 4)
    for i in range(n):
        member = bool(i % 2)
        yield BatchScore(
            index=i, half=i % 4 // 2, member=member, score=float(member == right[i]), decision=member == right[i]
        )


def in_batch(make, defense, share, value=None, **about):
    about = (dict(control="sigma", accuracy=0.94) if defense == "dp" else {}) | about
    return make(defense, value, "mia_upload", "batch_membership", scores=list(batch_scores(share)), **about)


class Said:
    """What each place says of the settings of dp, by control value."""

    def __init__(self, records):
        self.answer = answer_of(records, HOLDS)
        self.settings = {one["value"]: one for one in self.answer.as_dict()["settings"] if one["defense"] == "dp"}
        judged = defense_sentences(judged_evaluations(records))
        self.verdicts = [one.verdict for one in judged if one.defense == "dp"]
        self.rows = {
            (row["control_value"], row["seed"], row["batch_size"]): row
            for row in worst_rows(self.answer.boards)
            if row["defense"] == "dp"
        }
        self.page = unescape(Page(records, sentences=judged).html())
        self.terminal = [
            " ".join(str(cell) for cell in column.cells)
            for table in self.answer.tables
            for column in glance(table, 200).columns[1:2]
        ]

    def sentence(self, question, value=None):
        return [
            v
            for v in self.verdicts
            if v.question == question and (value is None or any(key.value == value for key in v.settings))
        ]


FATES = {"leaks": "falls", "withstands": "stands", "open": "undecided"}


def agree(said, value, level, words):
    """Assert that JSON, page, terminal, the table of worst cases and the sentence give inputs one level."""
    setting, (verdict,) = said.settings[value], said.sentence("pixels", value)
    (row,) = [row for (control, _, _), row in said.rows.items() if control == value]
    assert {setting["level"], verdict.leak.level, row["level"]} == {level}
    assert FATES[setting["fate"]] == verdict.fate
    assert setting["verdict"] == words and words in said.page and any(words in text for text in said.terminal)


@pytest.mark.parametrize(
    ("plant", "level", "words", "sentence"),
    [
        (lambda make: dp(make, 0.1, 8.0), "blind", BLIND, "see no more of images than a blind guess"),
        (
            lambda make: [*dp(make, 0.1, 8.0), one(make, "ig", "reconstruction", status="failed")],
            "undecided", "undecided, attacks failed", "blind guess 11.0 dB); attacks failed;",
        ),
        (
            lambda make: [changed(r, threat_model={"auxiliary": "public"}) for r in dp(make, 0.1, 8.0)],
            "undecided", "undecided, undefended not attacked", "; the undefended model was not attacked;",
        ),
        (
            lambda make: [*dp(make, 0.1, 8.0), flagged(in_batch(make, "dp", 0.5, 0.1))],
            "undecided", "undecided, belied", "; its server reads something else;",
        ),
    ],
)  # fmt: skip
def test_inputs_have_one_level_everywhere(fabricate, plant, level, words, sentence):
    said = Said([*controls(fabricate), *plant(fabricate)])
    agree(said, 0.1, level, words)
    assert sentence in said.sentence("pixels")[0].sentence


def test_an_attack_that_follows_an_aware_one_is_aware_everywhere(fabricate):
    """Its own declaration says nothing: the answers that it starts from are those of an aware attack."""
    about = dict(control="sigma", accuracy=0.94, n=40)
    refined = changed(
        fabricate("dp", 0.1, "refine", "reconstruction", 34.0, **about), attack={"follows": "adaptive_dp"}
    )
    said = Said([*controls(fabricate), *dp(fabricate, 0.1, 8.0), refined])
    agree(said, 0.1, "rebuilt", "rebuilt by refine")
    (row,), (verdict,) = said.rows.values(), said.sentence("pixels")
    assert (row["plain"], row["level_plain"], verdict.leak.plain) == ("dlg", "blind", "blind")
    assert "images are rebuilt by an aware attacker (refine: " in verdict.sentence
