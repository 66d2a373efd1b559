"""The first line and the signal of trust, from fabricated records: what each says, and that it could say otherwise."""

import io
import re
from fnmatch import fnmatchcase

import pytest
from rich.console import Console

from ppbench.base.bars import Bars
from ppbench.commands.terminal import glance, say_unfinished
from ppbench.records.schema import Metric
from ppbench.report.controls import Check, statuses_of
from ppbench.report.page.headline import answer_of, preliminary_words

HOLDS = Check("harness", True, "The harness passes.")


def controls(make, undefended=35.0, noise=6.0):
    return [
        make("none", None, "dlg", "reconstruction", undefended),
        make("none", None, "adaptive_dp", "reconstruction", undefended, adaptive=True),
        make("full_noise", None, "dlg", "reconstruction", noise),
    ]


def dp(make, value, decibels, accuracy=0.94, n=40, **more):
    about = dict(control="sigma", accuracy=accuracy, n=n, **more)
    return [
        make("dp", value, "dlg", "reconstruction", decibels - 1, **about),
        make("dp", value, "adaptive_dp", "reconstruction", decibels, adaptive=True, **about),
    ]


def spn(make, decibels):
    return [
        make("spn", 0.1, a, "reconstruction", d, adaptive=k, control="alpha2", n=40)
        for a, d, k in (("dlg", 7.0, False), ("adaptive_spn", decibels, True))
    ]


def at_seed(record, seed):
    """Return the record as an evaluation with another master seed has it."""
    config = record.config.model_copy(update={"seed": seed})
    return record.model_copy(update={"config": config, "cell_id": config.cell_id()})


def at_clip(record):
    """Return the record of a defense with a second parameter of a long name, which tells no two rows apart."""
    about = record.config.defense
    defense = about.model_copy(update={"parameters": {**about.parameters, "a_parameter_with_a_long_name": 12.25}})
    config = record.config.model_copy(update={"defense": defense})
    return record.model_copy(update={"config": config, "cell_id": config.cell_id()})


def answer_text(records, harness=HOLDS):
    answer = answer_of(records, harness)
    return answer.headline.words, answer.trust


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (((0.1, 34.0, 0.94),), "dp falls: images rebuilt at 35 dB (undefended 36, blind 11)."),
        (((0.1, 34.0, 0.94), (1.0, 16.0, 0.92)), "dp falls at both settings: images recognizable at 17 dB"),
        (((0.1, 8.0, 0.94),), "dp stands against the attacks tried here: images no better than blind at 9 dB"),
        (((0.1, 34.0, 0.94), (1.0, 8.0, 0.92)), "dp stands at sigma=1 against the attacks tried here"),
        (
            ((0.1, 34.0, 0.94), (1.0, 8.0, 0.70)),
            "dp falls at its one usable setting, sigma=0.1: images rebuilt at 35 dB (undefended 36, blind 11); 1 of 2 "
            "settings is not usable.",
        ),
        (
            ((0.1, 34.0, 0.94), (0.2, 33.0, 0.93), (1.0, 8.0, 0.70)),
            "dp falls at every usable setting: images rebuilt at 34 dB (undefended 36, blind 11) at sigma=0.2; 1 of 3 "
            "settings is not usable.",
        ),
        (
            ((0.1, 34.0, 0.94), (0.2, 33.0, 0.70), (0.3, 32.0, 0.60)),
            "dp falls at all 3 settings, 1 of them usable: images rebuilt at 35 dB",
        ),
        (
            ((0.1, 34.0, 0.94), (1.0, 8.0, 0.92)),
            "dp stands at sigma=1 against the attacks tried here: images no better than blind at 9 dB (undefended 36, "
            "blind 11); images are rebuilt at 35 dB at 1 of 2 settings.",
        ),
        (
            ((1.0, 8.0, 0.70),),
            "dp has no usable setting: it loses more than 5 points of accuracy.",
        ),
        (
            ((0.5, 34.0, 0.70), (1.0, 8.0, 0.60)),
            "dp has no usable setting: each of 2 loses more than 5 points of accuracy; "
            "images are rebuilt at 35 dB at 1 of 2 settings.",
        ),
    ],
)
def test_the_line_tells_of_the_usable_setting_that_leaks_least(fabricate, settings, words):
    mine = [record for value, decibels, accuracy in settings for record in dp(fabricate, value, decibels, accuracy)]
    assert answer_text([*controls(fabricate), *mine])[0].startswith(words)


def test_what_was_not_measured_or_stands_undefended_is_undecided_and_says_why(fabricate):
    older = fabricate("dp", 0.1, "adaptive_dp", "reconstruction", 8.0, adaptive=True, control="sigma", blind=None)
    assert answer_text([*controls(fabricate), older])[0].startswith(
        "dp is undecided: whether they are recognizable was not"
    )
    late = dict(stage="final", n=40)
    weak = [fabricate("none", None, "dlg", "reconstruction", 8.0, **late), *controls(fabricate)]
    after = fabricate("dp", 0.1, "dlg", "reconstruction", 8.0, control="sigma", **late)
    words, trust = answer_text([*weak, *dp(fabricate, 0.1, 8.0), after])
    assert words.startswith("dp stands") and trust.state == "partly" and trust.reliable
    assert (
        "1 of 2 boards can be judged; 1 cannot: even the undefended model resists the attacks there" in trust.sentence
    )


def untrained(record):
    """Return the record as a draft has it, without the figures of a training."""
    unknown = {"accuracy": None, "low": None, "high": None, "curve": [], "reason": "not trained yet"}
    return record.model_copy(update={"utility": record.utility.model_copy(update=unknown)})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (((0.1, 34.0),), "images rebuilt at 35 dB (undefended 36, blind 11)"),
        (
            ((0.1, 34.0), (0.2, 33.0)),
            "images rebuilt at both settings, at 35 dB (undefended 36, blind 11) at sigma=0.1",
        ),
        (
            ((0.1, 34.0), (0.2, 16.0), (1.0, 8.0)),
            "images rebuilt at 1 of 3 settings, at 35 dB (undefended 36, blind 11) at sigma=0.1; recognizable at 1 of "
            "3 settings, at 17 dB (undefended 36, blind 11) at sigma=0.2; no better than blind at 1 of 3 settings",
        ),
    ],
    ids=["one", "alike", "different"],
)
def test_before_anything_is_trained_it_tells_of_leaks_and_what_is_missing(fabricate, settings, words):
    """No setting is called usable, and no defense falls or stands."""
    records = [*controls(fabricate), *(r for value, decibels in settings for r in dp(fabricate, value, decibels))]
    first = preliminary_words(answer_of([untrained(r) for r in records], None))
    assert first == f"dp before training: {words} (preliminary; accuracy and the trained model follow)."
    trained = answer_of(records, None)
    assert preliminary_words(trained) == f"{trained.headline.words} (preliminary; still running)"


def test_before_anything_is_trained_labels_are_counted_by_setting(fabricate):
    labels = [
        fabricate("dp", value, "label_recovery", "label", share, control="sigma", n=40)
        for value, share in ((0.1, 1.0), (0.2, 0.1))
    ]
    records = [*controls(fabricate), *dp(fabricate, 0.1, 34.0), *dp(fabricate, 0.2, 8.0), *labels]
    words = preliminary_words(answer_of([untrained(r) for r in records], None))
    assert "; no better than blind at 1 of 2 settings; labels recovered at 1 of 2 settings (prelim" in words


def test_before_anything_is_trained_nothing_is_concluded_without_controls(fabricate):
    records = [untrained(r) for r in [*controls(fabricate, undefended=6.0), *dp(fabricate, 0.1, 34.0)]]
    assert preliminary_words(answer_of(records, None)).startswith("Nothing is concluded: the controls do not vouch")


def test_of_several_defenses_it_counts_who_falls_and_who_stands(fabricate):
    headline = answer_of([*controls(fabricate), *dp(fabricate, 0.1, 8.0), *spn(fabricate, 34.0)], HOLDS).headline
    message = "1 of 2 defenses falls at every usable setting (spn); 1 stands against the attacks tried here (dp)."
    assert (headline.words, headline.tone) == (message, "warning")  # no green over one that falls


def seeded(*seeds):
    """Return the answer to several evaluations that differ in their seeds alone."""
    return answer_of([at_seed(record, seed) for seed, some in enumerate(seeds) for record in some], HOLDS)


@pytest.mark.parametrize(
    ("decibels", "words", "tone"),
    [
        ((34.0, 33.0), "dp falls in both seeds: images rebuilt at 35 dB (undefended 36, blind 11).", "error"),
        ((34.0, 8.0), "dp falls in 1 of 2 seeds: images rebuilt at 35 dB (undefended 36, blind 11).", "error"),
        (
            (8.0, 8.0),
            "dp stands in both seeds against the attacks tried here: images no better than blind at 9 dB "
            "(undefended 36, blind 11).",
            "good",
        ),
    ],
)
def test_a_defense_of_several_seeds_is_one_and_falls_or_stands_by_all_of_them(fabricate, decibels, words, tone):
    answer = seeded(*([*controls(fabricate), *dp(fabricate, 0.1, value)] for value in decibels))
    assert (answer.headline.words, answer.headline.tone) == (words, tone)


def attacked(attack, kind, share=0.5, **about):
    """Return a maker of one more cell of dp, which states an epsilon of 2."""
    own = dict(control="sigma", accuracy=0.94, epsilon=2.0, **about)
    return lambda make: [make("dp", 0.1, attack, kind, share, **own)]


labels, members = attacked("label_recovery", "label", 1.0), attacked("mia_loss", "membership", 0.9)
failed = attacked("ig", "reconstruction", status="failed")


def audit(make):
    """An audit that finds an epsilon of 3, where the defense states 2."""
    about = dict(stage="audit", control="sigma", accuracy=0.94, epsilon=2.0)
    result = make("dp", 0.1, "mia_loss", "membership", **about)
    bound = Metric(name="epsilon_lower", value=3.0, method="one run", n=400, higher_is_safer=False)
    return [result.model_copy(update={"metrics": [*result.metrics, bound]})]


@pytest.mark.parametrize(
    ("more", "alone", "beside", "tone"),
    [
        (
            (labels,),
            "dp stands # no better than blind at 9 dB*, 100% of labels.",
            "1 stands # but for labels",
            "warning",
        ),
        ((members,), "dp stands # no better than blind at 9 dB*, members.", "1 stands # but for members", "warning"),
        (
            (labels, members),
            "dp stands #*, 100% of labels, members.",
            "1 stands # but for labels and members",
            "warning",
        ),
        ((failed,), "dp is undecided: attacks failed at 9 dB*.", "1 left undecided", "warning"),
        (
            (audit,),
            "dp is refuted: an audit shows that epsilon is at least 3, 2 is stated*.",
            "1 of 2 defenses with an epsilon that is refuted",
            "error",
        ),
    ],
)
def test_one_that_stands_is_never_said_to_without_what_it_gives_away(fabricate, more, alone, beside, tone):
    """What its row says, alone and among several; green is neither."""
    records = [
        *controls(fabricate),
        *dp(fabricate, 0.1, 8.0, epsilon=2.0),
        *(one for make in more for one in make(fabricate)),
    ]
    here = "against the attacks tried here"
    headline = answer_of(records, HOLDS).headline
    assert fnmatchcase(headline.words, alone.replace("#", f"{here}*"))
    assert headline.tone == tone
    several = [*records, *spn(fabricate, 7.0)]
    headline = answer_of(several, HOLDS).headline
    assert fnmatchcase(headline.words, f"*{beside.replace('#', here)} (dp)*") and headline.tone != "good"
    assert answer_of([*controls(fabricate), *spn(fabricate, 7.0)], HOLDS).headline.tone == "good"


def test_one_that_falls_and_whose_epsilon_is_refuted_is_said_to_do_both(fabricate):
    records = [*controls(fabricate), *dp(fabricate, 0.1, 34.0, epsilon=2.0), *audit(fabricate)]
    answer = answer_of(records, HOLDS)
    assert (
        answer.headline.words == "dp falls: images rebuilt at 35 dB (undefended 36, blind 11); its epsilon is refuted."
    )
    assert answer.tables[0].rows[-1].verdict == "rebuilt by adaptive_dp, epsilon refuted by audit"
    words = answer_of([*records, *spn(fabricate, 7.0)], HOLDS).headline.words
    assert words.startswith("1 of 2 defenses falls at every usable setting (dp)")


@pytest.mark.parametrize(
    ("decibels", "words"),
    [
        (
            (34.0, 8.0),
            "dp falls in both seeds: images rebuilt at 35 dB (undefended 36, blind 11); its epsilon is refuted.",
        ),
        ((8.0, 8.0), "dp is refuted: an audit shows that epsilon is at least 3, 2 is stated."),
    ],
)
def test_a_refuted_epsilon_of_one_seed_hides_no_fall_of_another_and_counts_beside_one_that_stands(
    fabricate, decibels, words
):
    falls, other = ([*controls(fabricate), *dp(fabricate, 0.1, value, epsilon=2.0)] for value in decibels)
    answer = seeded(falls, [*other, *audit(fabricate)])
    assert (answer.headline.words, answer.headline.tone) == (words, "error")


def test_a_setting_is_usable_by_its_accuracy_over_all_seeds(fabricate):
    """The seed of three that is usable is no reason to call the defense so, nor to say that it stands."""
    good = [*controls(fabricate), *dp(fabricate, 0.1, 8.0)]
    useless = [*controls(fabricate), *dp(fabricate, 0.1, 8.0, accuracy=0.6)]
    answer = seeded(good, useless, useless)
    assert answer.headline.words.startswith("dp has no usable setting: it loses more than 5 points of accuracy")
    (setting,) = answer.as_dict()["settings"]
    assert setting["usable"] is False and setting["accuracy"] == pytest.approx((0.94 + 0.6 + 0.6) / 3)
    several = seeded([*good, *spn(fabricate, 34.0)], useless, useless).headline.words
    assert "stand" not in several and "1 without a usable setting" in several


def test_a_defense_stands_only_at_a_setting_that_stands_in_every_seed(fabricate):
    """Two settings, each of which stands in another seed: neither stands in all."""
    one = [*controls(fabricate), *dp(fabricate, 0.1, 8.0), *dp(fabricate, 1.0, 34.0)]
    other = [*controls(fabricate), *dp(fabricate, 0.1, 34.0), *dp(fabricate, 1.0, 8.0)]
    answer = seeded(one, other)
    (table,) = answer.tables
    assert "falls in 1 of 2 seeds at both settings" in answer.headline.words and answer.headline.tone == "error"
    assert [row.judgement.verdict for row in table.compared[0].by_control] == [
        "rebuilt by adaptive_dp (1 of 2 seeds)"
    ] * 2


def test_what_stands_in_some_seeds_and_is_undecided_in_others_is_inconclusive(fabricate):
    stands = [*controls(fabricate), *dp(fabricate, 0.1, 8.0)]
    older = fabricate("dp", 0.1, "adaptive_dp", "reconstruction", 8.0, adaptive=True, control="sigma", blind=None)
    answer = seeded(stands, [*controls(fabricate), older], [*controls(fabricate), older])
    assert answer.headline.words == "dp: inconclusive, because it stands in 1 of 3 seeds."
    assert answer.tables[0].compared[0].verdict == "inconclusive (1 of 3 seeds)"
    alone = seeded(stands, controls(fabricate), controls(fabricate)).headline.words
    assert alone == "dp: inconclusive, because it stands in 1 of 3 seeds.", "in the others it was not evaluated"


def test_all_seeds_stand_in_one_table_at_the_same_setting(fabricate):
    seeds = [[*controls(fabricate), *dp(fabricate, s, 8.0), *dp(fabricate, 5.0, 8.0)] for s in (0.1, 0.2, 0.3)]
    answer = seeded(*seeds)
    (table,) = answer.tables
    assert table.about.endswith("seeds 0, 1 and 2") and table.seeds == 3
    assert answer.headline.words.startswith("dp stands at sigma=5 in all 3 seeds against")
    (row,) = table.compared
    assert row.value.entry.control == "sigma = 5" and len(row.grid) == 4


def test_of_many_defenses_some_are_named_and_all_are_counted(fabricate):
    records = controls(fabricate)
    for number in range(30):
        about = dict(control="sigma", accuracy=0.94, n=40)
        records.append(fabricate(f"package:defense_{number:02}", 0.1, "dlg", "reconstruction", 34.0, **about))
    words = answer_of(records, HOLDS).headline.words
    assert words.startswith("30 of 30 defenses fall at every usable setting (package:defense_00, ")
    named = words.count("package:defense_")
    assert words.endswith(f" and {30 - named} more).") and 2 < named < 8 and len(words) < 200


def test_who_knows_of_it_must_have_tried(fabricate):
    """A dB less than plain attacks find is no attack that knows: the table says so, and so does the first line."""
    weak = [
        fabricate("dp", 0.1, attack, "reconstruction", decibels, control="sigma", accuracy=0.94, n=40, adaptive=knows)
        for attack, decibels, knows in (("dlg", 8.0, False), ("adaptive_dp", 5.0, True))
    ]
    plain = [record for record in controls(fabricate) if record.config.attack.id == "dlg"]
    answer = answer_of([*plain, *weak], HOLDS)
    assert answer.headline.words.endswith("; untested against an aware attacker.")
    (table,) = answer.tables
    assert table.rows[-1].verdict == "no better than blind, untested" and answer.headline.tone == "warning"
    words = answer_of([*plain, *weak, *spn(fabricate, 7.0)], HOLDS).headline.words
    assert "1 stands against the attacks tried here, untested against aware attackers (dp)" in words


@pytest.mark.parametrize(
    ("undefended", "noise", "harness", "state"),
    [
        (35.0, 6.0, HOLDS, "holds"),
        (9.0, 6.0, HOLDS, "failed"),
        (35.0, 30.0, HOLDS, "failed"),
        (35.0, 6.0, Check("harness", False, "HARNESS FAULT."), "failed"),
        (35.0, 6.0, Check("harness", None, "Not known."), "unknown"),
    ],
)
def test_nothing_is_concluded_unless_every_control_ran_and_held(fabricate, undefended, noise, harness, state):
    words, trust = answer_text([*controls(fabricate, undefended, noise), *dp(fabricate, 0.1, 8.0)], harness)
    assert trust.state == state and trust.as_dict()["state"] == state
    assert words.startswith("Nothing is concluded") is (state != "holds")


def test_an_evaluation_whose_control_failed_does_not_silence_the_other(fabricate):
    sound = [*controls(fabricate), *dp(fabricate, 0.1, 34.0)]
    other = [r for r in controls(fabricate, noise=30.0)] + dp(fabricate, 0.1, 8.0)
    broken = [at_seed(record, 1) for record in other]
    words, trust = answer_text([*sound, *broken])
    assert words.startswith("dp falls in 1 of 2 seeds: images rebuilt at 35 dB"), "of what stands on sound controls"
    assert (trust.state, trust.evaluations, trust.sound) == ("failed", 2, 1)
    assert trust.sentence.startswith("A control failed in 1 of 2 evaluations, of which nothing is concluded: ")
    words, trust = answer_text([at_seed(record, 0) for record in other])
    assert words.startswith("Nothing is concluded") and trust.sound == 0


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_the_table_at_a_glance_never_cuts_what_it_is_about_nor_the_verdict(fabricate, width):
    mine = [at_clip(record) for value in (0.1, 0.25) for record in dp(fabricate, value, 34.0)]
    [table] = answer_of([*controls(fabricate), *mine], HOLDS).tables
    out = Console(width=width, record=True, file=io.StringIO())
    out.print(glance(table, width))
    printed = out.export_text()
    text = "".join(printed.split())
    assert max(map(len, printed.splitlines())) <= width
    assert "sigma=0.1" in text and "sigma=0.25" in text and "undefended" in text and "rebuilt" in text
    assert "…" not in printed.replace("worst c…", "")
    assert "accuracy" in printed and "upload" in printed, "a column that does not fit is named"


@pytest.mark.parametrize(
    ("least", "words"),
    [
        (80.0, "A client uploads 0.08 times what an undefended one does (ppdl) to 6 times (pbpfl)."),
        (0.25, "A client uploads 1/4,000 of what an undefended one does (ppdl) to 6 times (pbpfl)."),
    ],
)
def test_where_nothing_can_fall_costs_are_told(least, words, fabricate):
    labels = [
        fabricate(name, None, "label_recovery", "label", 1.0, bytes_up=size)
        for name, size in (("none", 1000.0), ("ppdl", least), ("pbpfl", 6000.0))
    ]
    noise = fabricate("full_noise", None, "label_recovery", "label", 0.1)
    assert answer_text([*labels, noise])[0] == words


def test_progress_names_the_cell_that_ended_and_what_did_not_complete():
    bars = Bars(quiet=True)
    bars.expect("attacking", 3)
    bars.cell("complete", "spn, ig, init, batch 1")
    bars.cell("failed", "spn, dlg, init, batch 8")
    (task,) = bars._bars.tasks
    assert task.fields["details"] == "(1 failed, spn, dlg, init, batch 8)"


def test_a_narrow_terminal_cuts_the_details_of_progress_alone(monkeypatch):
    """At 80 columns it read "211/… cells (spn, tracing, init, batch 8), left 0:0… gone 0:01:…"."""
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, color_system=None)
    monkeypatch.setattr("ppbench.base.bars.Console", lambda stderr: console)
    bars = Bars()
    bars.expect("attacking", 2110)
    with bars:
        bars.cell("complete", "spn alpha2=0.5, tracing, init, batch 8")
    assert re.search(r"cells +━* +0/2110 0:00:00 -:--:-- remaining \(spn", out.getvalue())


def test_an_attack_that_has_nothing_to_read_is_not_applicable_and_has_not_failed(fabricate):
    """FedPC's pilots and clients that send nothing were said to have failed, 36 cells of them."""
    reason = "attack 'adaptive_server': nothing in the view of server/1 can be read"
    idle = fabricate("dp", 0.1, "adaptive_server", "reconstruction", control="sigma", status="failed")
    idle = idle.model_copy(update={"reason": reason})
    broken = fabricate("dp", 0.1, "ig", "reconstruction", control="sigma", status="failed")
    out = Console(width=120, record=True, file=io.StringIO())
    say_unfinished(out, [idle, broken, *dp(fabricate, 0.1, 8.0)])
    printed = " ".join(out.export_text().split())
    assert printed == (
        "failed, 1 cell: it broke not applicable to dp, as nothing that they read is sent: adaptive_server"
    )
    assert statuses_of([idle, broken, *dp(fabricate, 0.1, 8.0)]) == {
        "complete": 2, "diverged": 0, "failed": 1, "not applicable": 1,
    }  # fmt: skip
