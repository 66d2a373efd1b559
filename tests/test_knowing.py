"""Who declares to know a defense vouches for nothing by that: neither a rank nor a word can be bought with it."""

import pytest

from ppbench.records.schema import Flag
from ppbench.report.controls import UNREPLAYED
from ppbench.report.entries import UNINFORMED
from ppbench.report.page.boards import boards_of, no_claims
from ppbench.report.verdict import sentences

WORDS = {"not_replayable": UNREPLAYED}
CLAUSE = "; no attack here is shown to know the defense; "


@pytest.fixture
def scene(fabricate):
    """Return controls that hold and a defense at two values under `dlg` and an attack that declares to know it."""

    def make(attack, result, plain=(8.0, 8.0), none=35.0, knows_all=False):
        records = [fabricate(d, None, "dlg", "reconstruction", db) for d, db in (("none", 35.0), ("full_noise", 6.0))]
        records.append(fabricate("none", None, attack, "reconstruction", none, adaptive=knows_all))
        for value, own, other in zip((0.1, 1.0), result, plain, strict=True):
            records.append(fabricate("mine", value, "dlg", "reconstruction", other, control="sigma"))
            outcome = dict(adaptive=True, control="sigma")
            records.append(fabricate("mine", value, attack, "reconstruction", own, **outcome))
        return records

    return make


def ranked(records):
    """Return, by control value, a defense's rank and its badges about who knows it."""
    (board,) = boards_of(records, no_claims)
    rows = [entry for entry in board.entries if entry.defense.id == "mine"]
    assert board.reliable
    return {e.key.value: (e.rank, [b.text for b in e.badges if b.text in UNINFORMED]) for e in rows}


def qualified(records):
    return [CLAUSE in s for s in sentences("mine", records) if "see no more of images than a blind guess" in s]


def test_a_rank_cannot_be_bought_by_an_attack_that_says_that_it_knows(scene):
    """A renamed iDLG: it breaks `none`, and finds what plain attacks find."""
    bought = scene("bought", (8.0, 8.0))
    assert ranked(bought) == {0.1: ("", [UNINFORMED[1]]), 1.0: ("", [UNINFORMED[1]])}
    assert qualified(bought) == [True, True]


def test_knowledge_shows_where_it_finds_what_nobody_else_does(scene):
    """At that setting alone: what breaks the easy one may be helpless at the hard one."""
    proven = scene("theirs", (35.0, 8.0))
    assert ranked(proven) == {0.1: ("1", []), 1.0: ("", [UNINFORMED[1]])}
    assert qualified(proven) == [True]
    lame = scene("theirs", (35.0, 8.0), none=9.0)
    assert all(badges == [UNINFORMED[1]] for _, badges in ranked(lame).values()), (
        "it does not break what nothing protects"
    )
    for declared_of_all in (scene("theirs", (8.0, 8.0), knows_all=True), scene("theirs", (35.0, 35.0), (35.0, 35.0))):
        assert all(rank == "" for rank, _ in ranked(declared_of_all).values())


def test_ours_count_at_full_strength_and_the_generic_one_where_the_truth_explains_it(scene):
    assert ranked(scene("adaptive_dp", (8.0, 7.5))) == {0.1: ("1-2", []), 1.0: ("1-2", [])}
    weak = ranked(scene("adaptive_dp", (8.0, 6.0), (8.0, 9.0)))
    assert weak[0.1][0] and weak[1.0] == ("", [UNINFORMED[1]]), "over a dB less than who knows nothing"
    assert ranked(scene("adaptive_dp", (8.0, 6.0), (8.0, 30.0)))[1.0] == ("2", []), "what falls needs no voucher"
    generic = ranked(scene("adaptive_server", (8.0, 6.0), (8.0, 9.0), knows_all=True))
    assert all(rank and not badges for rank, badges in generic.values())
    inexact = Flag(code="evidence_inexact", severity="info", detail="median discrepancy at the truth 0.1")
    some = scene("adaptive_server", (8.0, 6.0), (8.0, 9.0), knows_all=True)
    some = [r.model_copy(update={"flags": [inexact]}) if r.config.attack.id == "adaptive_server" else r for r in some]
    assert all(badges == [UNINFORMED[1]] for _, badges in ranked(some).values()), "clients do what it does not model"


def test_labels_explain_no_upload(scene, fabricate):
    """The generic attack on labels is asked of every defense: it would vouch for each, exact or not."""
    records = foreign(scene("adaptive_dp", (8.0, 7.5)))
    for defense, value in (("none", None), ("full_noise", None), ("mine", 0.1), ("mine", 1.0)):
        about = {"control": "sigma"} if value else {}
        records.append(fabricate(defense, value, "server_labels", "label", 0.1, adaptive=True, n=40, **about))
    board, *_ = boards_of(foreign(records), no_claims)
    rows = [entry for entry in board.entries if entry.defense.id == "mine"]
    assert "server_labels" in {record.config.attack.id for row in rows for record in row.records}
    assert all(UNINFORMED[1] in [badge.text for badge in row.badges] and not row.rank for row in rows)


def foreign(records, *flags):
    """Return records whose defense is another package's, with flags on its cells."""
    raised = [Flag(code=code, severity="warning", detail=f"{WORDS.get(code, code)}, it is said") for code in flags]

    def changed(record):
        defense = record.config.defense.model_copy(update={"code": "0123456789ab"})
        config = record.config.model_copy(update={"defense": defense})
        return record.model_copy(update={"config": config, "flags": raised})

    return [changed(r) if r.config.defense.id == "mine" else r for r in records]


def test_of_anothers_defense_only_what_is_seen_counts(scene):
    """Not the name of ours that it lends itself, but its law of noise, where that accounts for its uploads."""
    lent = scene("adaptive_dp", (8.0, 7.5))
    assert all(badges == [UNINFORMED[1]] for _, badges in ranked(foreign(lent)).values())
    assert ranked(foreign(lent, "law_explains")) == ranked(lent)
    weak = ranked(foreign(scene("adaptive_dp", (8.0, 6.0), (8.0, 9.0)), "law_explains"))
    assert weak[1.0] == ("", [UNINFORMED[1]]), "of an attack that finds less than who knows nothing"


@pytest.mark.parametrize(
    ("code", "badge"), [("channel", "belied"), ("not_replayable", UNREPLAYED), ("law_explains", "")]
)
def test_who_says_more_than_it_says_or_cannot_be_run_again_has_no_rank(scene, code, badge):
    records = foreign(scene("adaptive_dp", (8.0, 7.5)), "law_explains", code)
    (board,) = boards_of(records, no_claims)
    rows = [entry for entry in board.entries if entry.defense.id == "mine"]
    assert [bool(row.rank) for row in rows] == [not badge] * 2
    assert all((badge in [b.text for b in row.badges]) is bool(badge) for row in rows)
    blind = [f"{WORDS.get(code, code)}, it is said" in s for s in sentences("mine", records) if "undecided" in s]
    assert blind == ([True] * 2 if badge else [])
