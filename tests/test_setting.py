"""One judgment of a setting: page, terminal, JSON, tables and sentences say the same."""

from html import unescape

import numpy as np
import pytest

from ppbench.claims.check import check_claims
from ppbench.claims.claim import Claim
from ppbench.commands.terminal import defense_table, glance
from ppbench.questions.exposure import SecretScore
from ppbench.questions.membership import BatchScore
from ppbench.records.schema import Flag
from ppbench.report.controls import Check
from ppbench.report.frame import frame_of
from ppbench.report.page.boards import defense_sentences, judged_evaluations, worst_rows
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


class Rendered:
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


def agree(rendered, value, level, words):
    """Assert that JSON, page, terminal, the table of worst cases and the sentence give inputs one level."""
    setting, (verdict,) = rendered.settings[value], rendered.sentence("pixels", value)
    (row,) = [row for (control, _, _), row in rendered.rows.items() if control == value and row["level"]]
    assert {setting["level"], verdict.leak.level, row["level"]} == {level}
    assert FATES[setting["fate"]] == verdict.fate
    assert setting["verdict"] == words and words in rendered.page and any(words in text for text in rendered.terminal)


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
    rendered = Rendered([*controls(fabricate), *plant(fabricate)])
    agree(rendered, 0.1, level, words)
    assert sentence in rendered.sentence("pixels")[0].sentence


def test_an_attack_that_follows_an_aware_one_is_aware_everywhere(fabricate):
    """Its own declaration says nothing: the answers that it starts from are those of an aware attack."""
    about = dict(control="sigma", accuracy=0.94, n=40)
    refined = changed(
        fabricate("dp", 0.1, "refine", "reconstruction", 34.0, **about), attack={"follows": "adaptive_dp"}
    )
    rendered = Rendered([*controls(fabricate), *dp(fabricate, 0.1, 8.0), refined])
    agree(rendered, 0.1, "rebuilt", "rebuilt by refine")
    (row,), (verdict,) = rendered.rows.values(), rendered.sentence("pixels")
    assert (row["plain"], row["level_plain"], verdict.leak.plain) == ("dlg", "blind", "blind")
    assert "images are rebuilt by an aware attacker (refine: " in verdict.sentence


def test_what_only_a_larger_batch_shows_falls_in_the_headline_too(fabricate):
    """Labels at batch 1 took the place of images at batch 8, and the headline spoke of bytes."""
    images = [*controls(fabricate, batch=8), *dp(fabricate, 0.1, 34.0, batch=8)]
    for more in ([one(fabricate, "label_recovery", "label", 1.0)], controls(fabricate)):
        rendered = Rendered([*images, *more])
        agree(rendered, 0.1, "rebuilt", "rebuilt by adaptive_dp")
        assert rendered.answer.headline.words.startswith("dp falls: images rebuilt at 35 dB (undefended 36, blind 11)")
        assert "batch 8" in rendered.answer.tables[0].scene


@pytest.mark.parametrize(
    ("where", "before"),
    [(dict(stage="final"), "Before training, "), (dict(batch=8), "In batches of 1, ")],
    ids=["after training", "a larger batch"],
)
def test_what_leaks_in_one_scene_stands_in_none(fabricate, where, before):
    """Noise in the first round alone made a good verdict, above a sentence that images are rebuilt after training."""
    late = [*controls(fabricate, **where), *dp(fabricate, 0.1, 34.0, **where)]
    rendered = Rendered([*controls(fabricate), *dp(fabricate, 0.1, 8.0), *late])
    setting, verdicts = rendered.settings[0.1], rendered.sentence("pixels", 0.1)
    assert (setting["level"], setting["fate"], setting["verdict"]) == ("rebuilt", "leaks", "rebuilt by adaptive_dp")
    assert [one.fate for one in verdicts] == ["falls", "stands"]
    assert verdicts[1].sentence.startswith(f"{before}the attacks tried here see no more of images than a blind guess")
    assert rendered.answer.headline.tone == "error" and "images rebuilt at 35 dB" in rendered.answer.headline.words


def test_who_breaks_down_where_the_undefended_model_falls_does_not_stand(fabricate):
    """A defense that crashes on trained weights stood by what it did before training."""
    final = dict(stage="final", status="failed")
    late = [*controls(fabricate, stage="final"), *dp(fabricate, 0.1, 8.0, **final)]
    rendered = Rendered([*controls(fabricate), *dp(fabricate, 0.1, 8.0), *late])
    assert rendered.settings[0.1]["verdict"] == "undecided, attacks failed"
    resisted = [one for one in late if one.config.defense.id != "none"]
    rendered = Rendered([*controls(fabricate), *dp(fabricate, 0.1, 8.0), *resisted])
    assert rendered.settings[0.1]["verdict"] == BLIND, "there nothing shows that anything could be read"


def test_each_control_value_is_judged_where_it_was_attacked(fabricate):
    rendered = Rendered([*controls(fabricate), *controls(fabricate, batch=8), *dp(fabricate, 0.1, 8.0),
                 *dp(fabricate, 1.0, 34.0, batch=8)])  # fmt: skip
    agree(rendered, 0.1, "blind", BLIND)
    agree(rendered, 1.0, "rebuilt", "rebuilt by adaptive_dp")
    assert rendered.sentence("pixels", 1.0)[0].sentence.startswith("dp at sigma=1: images are rebuilt")


def test_each_adversary_is_judged_where_it_attacked(fabricate):
    late = dict(threat="server-active/1", batch=8)
    rendered = Rendered([*controls(fabricate), *controls(fabricate, **late), *dp(fabricate, 0.1, 8.0),
                 *dp(fabricate, 0.1, 34.0, **late)])  # fmt: skip
    levels = {key.threat: v.leak.level for v in rendered.sentence("pixels") for key in v.settings}
    assert levels == {"server/1": "blind", "server-active/1": "rebuilt"}
    assert rendered.settings[0.1]["fate"] == "leaks" and rendered.settings[0.1]["level"] == "rebuilt"


@pytest.mark.parametrize(("share", "falls"), [(1.0, True), (0.5, False)])
def test_who_was_in_a_batch_is_given_away_everywhere_or_nowhere(fabricate, share, falls):
    records = [*controls(fabricate), *dp(fabricate, 0.1, 8.0), in_batch(fabricate, "none", 1.0),
               in_batch(fabricate, "dp", share, 0.1)]  # fmt: skip
    rendered = Rendered(records)
    (verdict,), setting = rendered.sentence("members"), rendered.settings[0.1]
    assert (verdict.fate == "falls") is falls is ("batch members" in setting["gives"])
    words = f"{BLIND}, gives batch members"
    assert (setting["verdict"] == words) is (words in rendered.page) is (words in rendered.terminal[0]) is falls
    assert (rendered.answer.headline.tone == "good") is not falls
    assert ("batch members" in rendered.answer.headline.words) is falls


def test_labels_and_batch_members_that_one_scene_gives_away_are_given_away(fabricate):
    """Found after training, nothing was said of them, because nothing is found before it."""
    early = [one(fabricate, "label_recovery", "label", 0.1), in_batch(fabricate, "dp", 0.5, 0.1)]
    late = [one(fabricate, "label_recovery", "label", 1.0, stage="final"),
            in_batch(fabricate, "dp", 1.0, 0.1, stage="final")]  # fmt: skip
    plain = [in_batch(fabricate, "none", 1.0, **where) for where in ({}, dict(stage="final"))]
    rendered = Rendered([*controls(fabricate), *dp(fabricate, 0.1, 8.0), *plain, *early, *late])
    assert rendered.settings[0.1]["gives"] == ["labels", "batch members"]
    assert [v.fate for v in rendered.sentence("members")] == ["falls"]
    assert "reveals who was in a batch of 1 after training (mia_upload" in rendered.sentence("members")[0].sentence
    rendered = Rendered([*controls(fabricate), *dp(fabricate, 0.1, 8.0), *plain, *early])
    assert rendered.settings[0.1]["gives"] == []


@pytest.mark.parametrize(("apart", "count", "falls"), [(0, 12, True), (20, 12, False), (0, 5, False)])
def test_exposed_secrets_are_given_away_everywhere_or_nowhere(fabricate, apart, count, falls):
    """They stood in a sentence alone, below a good verdict; of five secrets all may be among the first by chance."""
    secrets = [SecretScore(index=i, rank=1 + apart * i, forms=256, member=True) for i in range(count)]
    audit = one(fabricate, "exposure", "exposure", scores=secrets, stage="audit", threat="client/1")
    rendered = Rendered([*controls(fabricate), *dp(fabricate, 0.1, 8.0), audit])
    (verdict,) = rendered.sentence("secrets")
    assert (verdict.fate == "falls") is falls is (rendered.settings[0.1]["gives"] == ["secrets"])
    words = f"{BLIND}, gives secrets"
    assert (
        (rendered.settings[0.1]["verdict"] == words)
        is (words in rendered.page)
        is (words in rendered.terminal[0])
        is falls
    )
    assert (rendered.answer.headline.tone == "good") is not falls
    assert ("is not shown to expose" in verdict.sentence) is not falls


def test_who_was_in_a_batch_of_table_rows_is_said_too(fabricate):
    table = dict(shape=(16,))
    inputs = [
        fabricate("none", None, "linear", "reconstruction", 50.0, error=0.01, **table),
        fabricate("full_noise", None, "linear", "reconstruction", 8.0, error=0.9, **table),
        one(fabricate, "linear", "reconstruction", 8.0, error=0.9, **table),
    ]
    rendered = Rendered(
        [*inputs, in_batch(fabricate, "none", 1.0, **table), in_batch(fabricate, "dp", 1.0, 0.1, **table)]
    )
    assert rendered.sentence("members")[0].fate == "falls" and rendered.settings[0.1]["gives"] == ["batch members"]


def test_the_table_of_a_sweep_has_the_figure_that_judges(fabricate):
    """Decibels of table rows say nothing: the larger error had the larger figure."""
    table = dict(shape=(16,))
    cells = [one(fabricate, "dlg", "reconstruction", 34.0, error=0.8, **table),
             one(fabricate, "linear", "reconstruction", 33.0, error=0.3, **table)]  # fmt: skip
    (row,) = defense_table(frame_of(cells)).columns[2].cells
    assert row == "error 30.0% linear"
    assert list(defense_table(frame_of(dp(fabricate, 0.1, 8.0))).columns[2].cells) == ["9.0 dB adaptive_dp"]


@pytest.mark.parametrize(
    ("plant", "verdict", "reason"),
    [
        (lambda make: [], "holds", "no attack tried sees more of images than a blind guess"),
        (lambda make: [one(make, "ig", "reconstruction", status="failed")], "inconclusive", "attacks failed"),
        (lambda make: [flagged(in_batch(make, "dp", 0.5, 0.1))], "inconclusive", "its server reads something else"),
        (lambda make: [*controls(make, batch=8), *dp(make, 1.0, 34.0, batch=8)], "falls", "images are rebuilt"),
    ],
)
def test_a_claim_of_hidden_images_is_judged_by_the_same_leaks(fabricate, plant, verdict, reason):
    """A claim held where an attack had failed, or another setting was attacked in larger batches alone."""
    records = [*controls(fabricate), *dp(fabricate, 0.1, 8.0), *plant(fabricate)]
    claim = Claim("psnr_median", 8.0, "digits", "mlp", None, "Table 1")
    (outcome,) = check_claims({"dp": (claim,)}, records, ())
    assert (outcome.finding.verdict, outcome.finding.reason.partition("; batch")[0]) == (verdict, reason)


def members(make, shares, stage="final", **about):
    """Return membership cells of dp by control value, beside an undefended model that gives members away."""
    beside = [make(d, None, "mia_loss", "membership", s, n=2000) for d, s in (("none", 0.9), ("full_noise", 0.5))]
    return beside + [one(make, "mia_loss", "membership", s, v, n=2000, stage=stage, **about) for v, s in shares]


@pytest.mark.parametrize(("share", "falls"), [(0.527, False), (0.6, True)])
def test_the_largest_of_a_grid_is_judged_at_the_level_of_the_grid_everywhere(fabricate, share, falls):
    """A share that one cell of twelve reaches by chance was a leak in the table and none in the sentence."""
    grid = [round(0.1 * (i + 1), 1) for i in range(12)]
    cells = members(fabricate, [(v, share if v == 0.1 else 0.5) for v in grid])
    rendered = Rendered([*controls(fabricate), *(r for v in grid for r in dp(fabricate, v, 8.0)), *cells])
    (verdict,) = rendered.sentence("members")
    assert (verdict.fate == "falls") is falls
    assert {v: "members" in one["gives"] for v, one in rendered.settings.items()} == {
        v: falls and v == 0.1 for v in grid
    }
    assert (
        (f"{BLIND}, gives members" in rendered.page)
        is falls
        is ("members at 1 of 12" in rendered.answer.headline.words)
    )


def test_members_compare_with_the_undefended_model_of_the_same_stage_alone(fabricate):
    """What clients train on is not what the undefended model delivers."""
    rendered = Rendered([*members(fabricate, [(1.0, 0.5)], stage="iterate", adaptive=True)])
    (verdict,), (setting,) = rendered.sentence("members"), rendered.settings.values()
    assert (verdict.fate, setting["fate"], setting["verdict"]) == ("undecided", "open", "undecided")
    assert "undefended: not attacked" in verdict.sentence


@pytest.mark.parametrize(
    ("share", "fate", "verdict"),
    [(0.99, "leaks", "outputs read by query"), (0.8, "leaks", "outputs read in part by query"),
     (0.6, "open", "undecided"), (0.5, "withstands", "members not found, outputs not read")],
)  # fmt: skip
def test_outputs_read_in_part_are_a_leak_everywhere(fabricate, share, fate, verdict):
    alike = dict(n=2000, alike=0.5)
    cells = [one(fabricate, "query", "extraction", share, stage="iterate", adaptive=True, **alike)]
    rendered = Rendered([*members(fabricate, [(0.1, 0.5)]), *cells])
    (outputs,), setting = rendered.sentence("outputs"), rendered.settings[0.1]
    assert (setting["fate"], setting["verdict"]) == (fate, verdict) and verdict in rendered.page
    assert outputs.fate == FATES[fate]


def test_nothing_stands_beside_an_undefended_model_that_learned_nothing(fabricate):
    records = [r.model_copy(update={"utility": r.utility.model_copy(update=dict(accuracy=0.1, low=0.08, high=0.12))})
               for r in members(fabricate, [(0.1, 0.5)])]  # fmt: skip
    rendered, learned = Rendered(records), Rendered(members(fabricate, [(0.1, 0.5)]))
    assert (learned.sentence("members")[0].fate, learned.settings[0.1]["verdict"]) == ("stands", "members not found")
    assert (rendered.sentence("members")[0].fate, rendered.settings[0.1]["verdict"]) == ("undecided", "undecided")


@pytest.mark.parametrize(
    ("none", "mine", "usable"),
    [(0.95, 0.94, True), (0.18, 0.135, False), (0.95, 0.5, False), (0.95, 0.1, False), (0.1, 0.1, None)],
)
def test_a_model_that_is_not_usable_is_so_in_table_rank_and_headline(fabricate, none, mine, usable):
    """13.5% of 18% is within five points, and half of what was learned is gone: it had a rank all the same."""
    rendered = Rendered([*controls(fabricate, accuracy=none), *dp(fabricate, 0.1, 8.0, accuracy=mine)])
    (row,), setting = rendered.rows.values(), rendered.settings[0.1]
    assert setting["usable"] is usable and (row["rank_low"] is not None) is bool(usable)
    (sentence,) = rendered.sentence("pixels")
    assert sentence.sentence.endswith(", not usable.") is (usable is False)
    assert (
        ("not usable" in rendered.terminal[0])
        is ("has no usable setting" in rendered.answer.headline.words)
        is (usable is False)
    )


def seeds(*evaluations):
    return [changed(record, seed=seed) for seed, some in enumerate(evaluations) for record in some]


def test_seeds_are_judged_one_by_one_and_pooled_once(fabricate):
    """One seed that stands, one undecided beside a model that learned nothing, one that falls."""
    stands = [*controls(fabricate), *dp(fabricate, 0.1, 8.0)]
    unlearned = [*controls(fabricate, accuracy=0.1), *dp(fabricate, 0.1, 8.0, accuracy=0.1)]
    falls = [*controls(fabricate), *dp(fabricate, 0.1, 34.0)]
    for some, fates, words in (
        ((stands, unlearned), ["stands", "undecided"], "inconclusive (1 of 2 seeds)"),
        ((stands, falls), ["stands", "falls"], "rebuilt by adaptive_dp (1 of 2 seeds)"),
        ((stands, stands), ["stands", "stands"], BLIND),
    ):
        rendered = Rendered(seeds(*some))
        assert [v.fate for v in rendered.sentence("pixels")] == fates
        assert [rendered.rows[0.1, seed, 1]["level"] for seed in (0, 1)] == [
            {"stands": "blind", "falls": "rebuilt"}.get(fate, fate) for fate in fates
        ]
        assert rendered.settings[0.1]["verdict"] == words and words in rendered.page


def test_a_seed_is_compared_with_the_undefended_model_of_its_own_seed(fabricate):
    """At seed 1 the undefended model was not attacked in batches of 8."""
    late = dict(batch=8)
    one, two = [*controls(fabricate), *controls(fabricate, **late)], controls(fabricate)
    rendered = Rendered(seeds([*one, *dp(fabricate, 0.1, 8.0, **late)], [*two, *dp(fabricate, 0.1, 8.0, **late)]))
    assert [v.leak.level for v in rendered.sentence("pixels")] == ["blind", "undecided"]
    assert [rendered.rows[0.1, seed, 8]["level"] for seed in (0, 1)] == ["blind", "undecided"]
    assert rendered.settings[0.1]["verdict"] == "inconclusive (1 of 2 seeds)"


def collapsed(records):
    return [r.model_copy(update={"utility": r.utility.model_copy(update={"collapsed": 3})}) for r in records]


@pytest.mark.parametrize(
    ("first", "words"), [(0.1, "training collapsed"), (0.94, "training collapsed in 1 of 2 seeds")]
)
def test_a_collapsed_training_is_marked_everywhere(fabricate, first, words):
    """The seed that is shown need not be the one of which no training learned."""
    bad = [*controls(fabricate), *collapsed(dp(fabricate, 0.1, 8.0, accuracy=0.1))]
    good = [*controls(fabricate), *dp(fabricate, 0.1, 8.1, accuracy=first)]
    rendered = Rendered(bad if first < 0.5 else seeds(good, bad))
    assert rendered.settings[0.1]["usable"] is False
    assert all(row["rank_low"] is None for (_, seed, _), row in rendered.rows.items() if seed or first < 0.5)
    assert f"{BLIND}; not usable; {words}" in rendered.terminal[0] and f"{BLIND}; not usable; {words}" in rendered.page
    assert rendered.answer.headline.words == f"dp has no usable setting: its {words}."
    assert "collapsed in 3 of 3 trainings, not usable." in rendered.sentence("pixels")[-1].sentence


def test_seeds_that_stand_pool_their_qualifiers(fabricate):
    """Members are found at one seed, labels at the other: the table spoke of one of them."""
    one_seed = [*controls(fabricate), *dp(fabricate, 0.1, 8.0)]
    labels = one(fabricate, "label_recovery", "label", 1.0)
    rendered = Rendered(seeds([*one_seed, labels], [*one_seed, *members(fabricate, [(0.1, 0.6)])]))
    assert rendered.settings[0.1]["gives"] == ["labels", "members"]
    assert rendered.settings[0.1]["verdict"] == f"{BLIND}, gives labels, gives members"


def test_what_is_found_where_controls_fail_is_not_concluded(fabricate):
    """At seed 1 the undefended model resists, so labels that are recovered there count for nothing."""
    good = [*controls(fabricate), *dp(fabricate, 0.1, 8.0)]
    bad = [r for r in good if r.config.defense.id != "none"] + [fabricate("none", None, "dlg", "reconstruction", 8.0)]
    rendered = Rendered(seeds(good, [*bad, one(fabricate, "label_recovery", "label", 1.0)]))
    assert rendered.settings[0.1]["gives"] == [] and len(rendered.sentence("pixels")) == 1


def test_outputs_that_are_read_are_given_away_beside_images_that_are_not(fabricate):
    cells = [one(fabricate, "query", "extraction", 0.99, stage="iterate", adaptive=True, n=2000, alike=0.5)]
    rendered = Rendered([*controls(fabricate), *dp(fabricate, 0.1, 8.0), *cells])
    assert rendered.sentence("outputs")[0].fate == "falls" and rendered.settings[0.1]["gives"] == ["outputs"]
    assert rendered.settings[0.1]["verdict"] == f"{BLIND}, gives outputs" in rendered.page


def test_an_undefended_model_that_resists_is_no_credit_anywhere(fabricate):
    """It falls at batch 1; in batches of 8 nothing is shown of a defense that was attacked there alone."""
    weak = fabricate("none", None, "dlg", "reconstruction", 8.0, batch=8, n=40)
    rendered = Rendered([*controls(fabricate), weak, *dp(fabricate, 0.1, 8.0, batch=8)])
    agree(rendered, 0.1, "undecided", "undecided: even undefended resists")
    assert "even the undefended model resists these attacks" in rendered.sentence("pixels")[0].sentence
