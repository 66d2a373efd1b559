"""How far inputs leak, asked by a sceptic: half-legible is not hidden, noise is not found, and what is said travels."""

import itertools

import numpy as np
import pytest
from daily import every_third_row
from hypothesis import given, settings
from hypothesis import strategies as st

from ppbench.metrics.intervals import CLUSTER_CORRELATION, clopper_pearson, lower_bound, upper_bound
from ppbench.metrics.modality import Image, Threshold
from ppbench.records.schema import Flag
from ppbench.report.controls import check_controls
from ppbench.report.knowing import breaks
from ppbench.report.leak import SEVERITY, leak_of

BLIND = 11.0


def victims(decibels, matched, read, batch=1, blind=BLIND, gallery=500, **more):
    """Return scores of images: by victim its dB, whether it is found among others, whether its class is read."""
    made = []
    for i, (db, rank, right) in enumerate(zip(decibels, matched, read, strict=True)):
        looks = dict(gallery=gallery, rank=0 if rank else 3, read=bool(right), common=0.1)
        one = dict(kind="image", probe=i // batch, client=0, index=i % batch, psnr=db, rmse=0.5, rmse_raw=0.5, mse=0.1)
        one |= dict.fromkeys(("ssim", "label", "confidence", "at_truth")) | dict(evaluations=1, blind=blind, oracle=db)
        made.append(one | dict(recognition=looks) | more)
    return made


def cell(make, scores, attack="dlg", defense="dp", **more):
    """Return the cell of an attack on dp, or on no defense, with these scores."""
    value, batch = None if defense == "none" else 0.1, 1 + max(score["index"] for score in scores)
    return make(defense, value, attack, "reconstruction", scores=scores, **dict(control="sigma", batch=batch) | more)


def undefended(make, db=35.0):
    """Return how far the undefended model leaks, of 12 victims at so many dB."""
    seen = [db > BLIND + 2] * 12
    return leak_of([cell(make, victims([db] * 12, seen, seen), defense="none")], vouched=True)


def beside(make, *cells, vouched=True):
    """Return how far a defense leaks beside an undefended model that falls."""
    return leak_of(cells, vouched=vouched, none=undefended(make))


def codes(leak):
    return [one.code for one in leak.qualifiers]


# -- the control: are the attacks any good? ---------------------------------------------------------------------------
@pytest.mark.parametrize(("rebuilt", "matched", "ok"), [(0, 6, True), (0, 5, False), (3, 6, True), (3, 3, False)])
def test_attacks_that_let_half_of_the_undefended_images_be_found_again_are_not_weak(fabricate, rebuilt, matched, ok):
    """As of ResNet20 at 14 dB. Of 12 images `rebuilt` are, the first `found` are found again: each counts once."""
    scores = victims([40.0] * rebuilt + [13.0] * (12 - rebuilt), [i < matched for i in range(12)], [False] * 12)
    record = cell(fabricate, scores, defense="none", attack="ig")
    blank = cell(fabricate, victims([8.0] * 12, [False] * 12, [False] * 12), defense="none", attack="dlg")
    check = check_controls([record, blank])[0]
    assert (check.ok, breaks(record), breaks(blank)) == (ok, ok, False)
    verb = "breaks" if ok else "does NOT break"
    share = f"{max(rebuilt, matched) / 12:.0%} of images are rebuilt or re-identified"
    assert check.sentence == f"The best attack (ig) {verb} the undefended model: {share}."


def test_what_chance_finds_in_a_small_gallery_breaks_nothing(fabricate):
    scores = victims([8.0] * 12, [i < 7 for i in range(12)], [False] * 12, gallery=3)
    record = cell(fabricate, scores, defense="none", attack="ig")
    assert record.metric("reidentified").chance == 0.25 and record.metric("reidentified").value > 0.5
    assert check_controls([record])[0].ok is False and not breaks(record)


def test_where_half_are_rebuilt_the_control_speaks_of_nothing_else(fabricate):
    some = [
        cell(fabricate, victims([db] * 6 + [8.0] * 6, [matched] * 12, [False] * 12), defense="none", attack=name)
        for name, db, matched in (("dlg", 40.0, False), ("ig", 13.0, True))
    ]
    expected = "The best attack (dlg) breaks the undefended model: 50% of images are rebuilt."
    assert check_controls(some)[0].sentence == expected


# -- what is legible, and what is noise -------------------------------------------------------------------------------
@pytest.mark.parametrize("blind", [11.0, 13.0])
@pytest.mark.parametrize("db", [10.0, 14.0, 18.7, 19.0])
@pytest.mark.parametrize(("matched", "read"), [(True, True), (True, False), (False, True)])
def test_planted_half_legible_images_are_recognizable_whatever_their_decibels(fabricate, db, blind, matched, read):
    """As ppdl on MNIST, 18.7 dB: below any cut in decibels, and everybody sees what it is."""
    scores = victims(np.linspace(db - 0.5, db + 0.5, 10), [matched] * 10, [read] * 10, blind=blind)
    leak = beside(fabricate, cell(fabricate, scores))
    assert (leak.level, leak.plain, leak.falls, codes(leak)) == ("recognizable", "recognizable", True, [])


@pytest.mark.parametrize("blind", [None, 8.0, 25.0, 49.5, 55.0])
def test_where_every_single_one_is_rebuilt_they_are_rebuilt(fabricate, blind):
    """Beside blind guesses that do well of images with little in them, and without any in older records."""
    scores = victims([62.0, 63.0] * 6, [True] * 12, [True] * 12, blind=blind)
    leak = beside(fabricate, cell(fabricate, scores), vouched=False)
    assert (leak.level, leak.plain, codes(leak)) == ("rebuilt", "rebuilt", [])


@pytest.mark.parametrize(("gains", "level"), [((10.0, 12.0), "rebuilt"), ((9.9, 9.9), "recognizable")])
def test_where_rebuilt_is_ten_decibels_beyond_the_best_blind_guess_the_whole_interval_lies_there(
    fabricate, monkeypatch, gains, level
):
    rule = Threshold(lambda score: score.gain, "gain_median", 10.0, "10 dB beyond the best blind guess")
    monkeypatch.setattr(Image, "thresholds", (rule,))
    for blind in (9.0, 14.0):
        scores = victims([blind + gain for gain in gains] * 6, [True] * 12, [True] * 12, blind=blind)
        assert beside(fabricate, cell(fabricate, scores)).level == level
    mixed = victims([40.0] * 6 + [12.0] * 6, [True] * 12, [True] * 12)
    leak = beside(fabricate, cell(fabricate, mixed))
    assert leak.level == "recognizable" and codes(leak) == ["some_rebuilt"], "the median's whole interval counts"


NOISE = victims(np.linspace(6.0, 9.0, 12), [False] * 12, [True] + [False] * 11)


def test_noise_at_chance_is_blind_only_beside_an_undefended_model_that_falls(fabricate):
    leak = leak_of([cell(fabricate, NOISE)], vouched=True, none=undefended(fabricate, 35.0))
    assert (leak.level, leak.plain, leak.falls, codes(leak)) == ("blind", "blind", False, [])
    legible = leak_of([cell(fabricate, NOISE)], vouched=True, none=undefended(fabricate, 16.0))
    assert legible.level == "blind", "recognizable is enough to vouch for the attacks"
    stands = leak_of([cell(fabricate, NOISE)], vouched=True, none=undefended(fabricate, 9.0))
    assert (stands.level, stands.plain, codes(stands)) == ("undecided", "undecided", ["undefended_stands"])
    half = leak_of(
        [cell(fabricate, victims([40.0] * 6 + [5.0] * 6, [False] * 12, [False] * 12), defense="none")], vouched=True
    )
    few = leak_of([cell(fabricate, NOISE)], vouched=True, none=half)
    assert not half.falls and codes(few) == ["few_victims"], "half of its images are rebuilt: it does not resist"
    alone = leak_of([cell(fabricate, NOISE)], vouched=True)
    assert (alone.level, alone.plain, codes(alone)) == ("undecided", "undecided", ["undefended_missing"])
    resisting = undefended(fabricate, 9.0)
    assert (resisting.level, codes(resisting)) == ("undecided", ["undefended_stands"]), (
        "nothing vouches for the attacks"
    )


def test_one_victim_of_twenty_that_is_rebuilt_is_said_and_is_never_blind(fabricate):
    alone = [True] + [False] * 19
    leak = beside(fabricate, cell(fabricate, victims([40.0] + [8.0] * 19, alone, alone)))
    assert leak.level == "undecided" and codes(leak) == ["some_rebuilt"]
    assert leak.qualifiers[0].words == "5% of images are rebuilt"
    unread = beside(fabricate, cell(fabricate, victims([40.0] + [8.0] * 19, [False] * 20, [False] * 20)))
    assert unread.level == "undecided" and codes(unread) == ["some_rebuilt"]


def test_originals_that_are_found_in_some_cell_are_more_than_blind_though_blurs_score_better(fabricate):
    """Who takes the noisy images to a gallery finds four of twelve; by decibels the blurred ones are the worst case."""
    blur = cell(fabricate, victims([10.5] * 12, [False] * 12, [False] * 12), "ig")
    noisy = cell(fabricate, victims([7.0] * 12, [True] * 4 + [False] * 8, [False] * 12))
    assert beside(fabricate, blur).level == "blind"
    assert beside(fabricate, blur, noisy).level == "undecided"
    clear = cell(fabricate, victims([7.0] * 12, [True] * 12, [False] * 12))
    leak = beside(fabricate, blur, clear)
    assert leak.level == "recognizable" and [name for name, _ in leak.everybody.clear] == ["reidentified"]


def test_a_median_that_lies_beyond_the_blind_guess_is_not_blind(fabricate):
    scores = victims([BLIND + 2.0] * 12, [False] * 12, [False] * 12)
    assert beside(fabricate, cell(fabricate, scores)).level == "undecided"
    close = victims([BLIND + 0.9] * 12, [False] * 12, [False] * 12)
    assert beside(fabricate, cell(fabricate, close)).level == "blind"


# -- qualifiers -------------------------------------------------------------------------------------------------------
def test_older_records_cannot_say_that_nothing_is_recognizable(fabricate):
    older = [{**score, "recognition": None} for score in NOISE]
    leak = beside(fabricate, cell(fabricate, older))
    assert (leak.level, codes(leak)) == ("undecided", ["unmeasured"])
    oldest = [{**score, "blind": None} for score in older]
    assert beside(fabricate, cell(fabricate, oldest)).level == "undecided"
    better = cell(fabricate, [{**score, "psnr": score["psnr"] + 1} for score in older], "ig")
    mixed = beside(fabricate, cell(fabricate, NOISE), better)
    assert (mixed.level, codes(mixed)) == ("undecided", ["unmeasured"]), "an older cell beside a newer one"
    legible = cell(fabricate, victims([9.0] * 12, [True] * 12, [True] * 12), "ig")
    assert beside(fabricate, cell(fabricate, older), legible).level == "recognizable"


def test_that_no_attack_knows_the_defense_travels_with_every_level_but_the_worst(fabricate):
    for scores, level in ((NOISE, "blind"), (victims([15.0] * 12, [True] * 12, [True] * 12), "recognizable")):
        leak = beside(fabricate, cell(fabricate, scores), vouched=False)
        assert (leak.level, codes(leak)) == (level, ["untested"])
        assert codes(beside(fabricate, cell(fabricate, scores))) == []
    none = leak_of([cell(fabricate, NOISE, defense="none")], vouched=False)
    assert codes(none) == ["undefended_stands"], "not untested: there is nothing to know of no defense"


@pytest.mark.parametrize("code", ["own_account", "own_weights", "probe_noticed"])
def test_who_is_belied_is_not_blind_and_it_is_said_at_every_level(fabricate, code):
    lie = Flag(code=code, severity="warning", detail="its account is false")
    other = Flag(code="evidence_inexact", severity="info", detail="another matter")
    for scores, level in ((NOISE, "undecided"), (victims([40.0] * 12, [True] * 12, [True] * 12), "rebuilt")):
        record = cell(fabricate, scores).model_copy(update={"flags": [other, lie, lie]})
        leak = beside(fabricate, record)
        assert (leak.level, leak.belied, codes(leak)) == (level, "its account is false", ["belied"])


def test_what_has_no_figure_is_undecided_and_what_rebuilds_nothing_has_no_level(fabricate):
    failed = fabricate("dp", 0.1, "dlg", "reconstruction", status="failed", control="sigma")
    assert leak_of([failed], vouched=True).level == beside(fabricate, failed).level == "undecided"
    unread = failed.model_copy(update={"reason": "No upload can be read"})
    assert not beside(fabricate, unread).lacking and beside(fabricate, unread).level == "undecided"
    assert leak_of([fabricate("dp", 0.1, "mia_loss", "membership", control="sigma")], vouched=True) is None


def test_who_knows_and_who_does_not_are_told_apart(fabricate):
    sharp = cell(fabricate, victims([40.0] * 12, [True] * 12, [True] * 12), "adaptive_dp", adaptive=True)
    leak = leak_of([cell(fabricate, NOISE), sharp], vouched=True, none=undefended(fabricate))
    assert (leak.level, leak.plain) == ("rebuilt", "blind")
    quiet = cell(fabricate, NOISE, "adaptive_dp", adaptive=True)
    unsure = cell(fabricate, victims([13.5] * 12, [True] * 3 + [False] * 9, [False] * 12))
    both = beside(fabricate, unsure, quiet)
    assert both.level == both.plain == "undecided"


# -- how much is enough -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("matched", "level"), [(0, "blind"), (1, "undecided"), (3, "undecided"), (4, "undecided"), (6, "recognizable")]
)
@pytest.mark.parametrize("which", ["found", "read"])
def test_well_above_chance_is_an_interval_that_begins_a_tenth_beyond_it(fabricate, matched, level, which):
    some, none = [True] * matched + [False] * (12 - matched), [False] * 12
    scores = victims([8.0] * 12, *((some, none) if which == "found" else (none, some)))
    if (matched, which) == (1, "read"):  # chance: one of ten
        level = "blind"
    if (matched, which) == (6, "read"):
        level = "undecided"
    assert beside(fabricate, cell(fabricate, scores)).level == level


def test_what_one_of_many_attacks_finds_is_judged_at_the_level_of_all(fabricate):
    matched = cell(fabricate, victims([8.0] * 12, [True] * 5 + [False] * 7, [False] * 12))
    noise = [cell(fabricate, victims([7.0] * 12, [False] * 12, [False] * 12), f"attack{i}") for i in range(40)]
    assert beside(fabricate, matched).level == "recognizable"
    assert beside(fabricate, matched, *noise).level == "undecided"


@pytest.mark.parametrize(
    ("units", "share", "level"), [(1, 1.0, "undecided"), (2, 1.0, "recognizable"), (3, 1.0, "recognizable"),
                                  (3, 0.75, "recognizable"), (3, 0.0, "undecided"), (6, 0.0, "blind")]
)  # fmt: skip
def test_of_batches_each_is_little_more_than_one_witness(fabricate, units, share, level):
    seen = ([True] * round(8 * share) + [False] * round(8 * (1 - share))) * units
    scores = victims([15.0 if share else 8.0] * 8 * units, seen, [False] * 8 * units, batch=8)
    assert beside(fabricate, cell(fabricate, scores)).level == level


LOOK = st.tuples(st.integers(5, 40), st.booleans(), st.booleans())


@pytest.mark.nightly
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_an_image_that_is_more_recognizable_never_lowers_the_level(fabricate, data):
    units, batch = data.draw(st.sampled_from([(5, 1), (12, 1), (3, 8), (6, 4)]))
    looks = st.lists(LOOK, min_size=units * batch, max_size=units * batch)
    alike = looks | LOOK.map(lambda one: [one] * (units * batch))
    first, second = data.draw(alike), data.draw(alike)
    place = data.draw(st.integers(0, units * batch - 1))
    more = [*first]
    more[place] = (first[place][0] + data.draw(st.integers(0, 30)), True, True)

    def level(some):
        cells = [cell(fabricate, victims(*zip(*one, strict=True), batch), name) for one, name in some]
        return beside(fabricate, *cells).level

    before, after = (level([(one, "dlg"), (second, "ig")]) for one in (first, more))
    assert SEVERITY[after] >= SEVERITY[before], (before, after)


# -- rows of tables ---------------------------------------------------------------------------------------------------
def rows(make, right, error, blind=0.5, defense="dp"):
    """Return the cell of twelve table rows: the share of columns that are right, and what who sees nothing gets."""
    spread = np.clip(right + np.linspace(-0.04, 0.04, 12), 0, 1)
    scores = [
        one | dict(accuracy=float(share), blind_accuracy=blind, recognition=None, rmse=error)
        for one, share in zip(victims([15.0] * 12, [False] * 12, [False] * 12), spread, strict=True)
    ]
    return cell(make, scores, defense=defense, shape=(16,), classes=2)


@pytest.mark.parametrize(
    ("right", "error", "blind", "level"),
    [
        (0.95, 0.02, 0.5, "rebuilt"),
        (0.95, 0.02, None, "rebuilt"),
        (0.9, 0.5, 0.5, "recognizable"),
        (0.7, 0.5, 0.5, "recognizable"),
        (0.61, 0.5, 0.5, "undecided"),
        (0.56, 0.5, 0.5, "blind"),
        (0.5, 0.9, 0.5, "blind"),
        (0.9, 0.5, 0.88, "blind"),
        (0.9, 0.5, None, "undecided"),
        (0.3, 0.9, None, "undecided"),
    ],
)
def test_rows_are_judged_by_their_columns_beside_who_sees_nothing(fabricate, right, error, blind, level):
    none = leak_of([rows(fabricate, 1.0, 0.01, defense="none")], vouched=True)
    leak = leak_of([rows(fabricate, right, error, blind)], vouched=True, none=none)
    assert (none.level, leak.level, leak.noun) == ("rebuilt", level, "rows")


# -- bounds of shares -------------------------------------------------------------------------------------------------
def hits(*units):
    """Return units of (hits, size) as arrays of bool."""
    return [np.arange(size) < k for k, size in units]


@pytest.mark.parametrize("n", [2, 5, 12, 60])
def test_bounds_of_single_victims_are_clopper_and_pearsons(n):
    for k in range(n + 1):
        exact, units = clopper_pearson(k, n), hits(*[(i < k, 1) for i in range(n)])
        assert lower_bound(units) == pytest.approx(exact.low, abs=1e-12)
        assert upper_bound(units) == pytest.approx(exact.high, abs=1e-12)
        assert lower_bound(units, 0.001) <= lower_bound(units) and upper_bound(units, 0.001) >= upper_bound(units)


@pytest.mark.parametrize("size", [1, 8])
def test_one_unit_bounds_nothing(size):
    for k in (0, size):
        assert (lower_bound(hits((k, size))), upper_bound(hits((k, size)))) == (0.0, 1.0)


SIZES = st.lists(st.integers(1, 9), min_size=2, max_size=8)


@given(
    SIZES.flatmap(lambda sizes: st.tuples(st.just(sizes), st.tuples(*(st.integers(0, n) for n in sizes)))), st.data()
)
def test_one_more_hit_never_lowers_a_bound(units, data):
    sizes, matched = units
    place = data.draw(st.integers(0, len(sizes) - 1))
    more = [min(k + (i == place), n) for i, (k, n) in enumerate(zip(matched, sizes, strict=True))]
    one, two = (hits(*zip(some, sizes, strict=True)) for some in (matched, more))
    for bound in (lower_bound, upper_bound):
        assert bound(one) <= bound(two) + 1e-12
    assert lower_bound(one) <= sum(matched) / sum(sizes) <= upper_bound(one)


@pytest.mark.parametrize(("units", "size"), every_third_row([(3, 8), (6, 8), (5, 4), (20, 2)]))
@pytest.mark.parametrize("tail", [0.025, 0.0025])
def test_bounds_hold_their_level_while_victims_of_a_batch_are_alike_up_to_what_is_said(units, size, tail):
    """Beta-binomial batches: shares of their own whose correlation is none, some, and the most that is allowed."""
    draw, trials = np.random.default_rng(4), 8000
    table = [lower_bound(hits(*[(k // units + (i < k % units), size) for i in range(units)]), tail)
             for k in range(units * size + 1)]  # fmt: skip
    missed = {}
    for alike, share in itertools.product(
        (0.0, CLUSTER_CORRELATION / 2, CLUSTER_CORRELATION), (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
    ):
        spread = (1 - alike) / alike if alike else 1e6
        own = draw.beta(share * spread, (1 - share) * spread, size=(trials, units))
        missed[alike, share] = (np.array(table)[draw.binomial(size, own).sum(1)] > share).mean()
    assert max(missed.values()) <= tail + 4 * np.sqrt(tail / trials), missed
    assert max(missed.values()) >= tail / 4, "and it is no wider than it must be"


# -- texts ------------------------------------------------------------------------------------------------------------
def texts(make, in_place, in_any_order, blind=0.3, defense="dp"):
    """Return the cell of twelve texts: the shares of tokens in place and in any order, and what a blind guess has."""
    spread = np.linspace(-0.02, 0.02, 12)
    scores = [
        one | dict(accuracy=in_place, blind_accuracy=0.1, recognition=None, text=dict(
            guess="a b", truth="b a", in_set=float(in_any_order + more), exact=False, run=1, facts=None,
            blind_in_set=blind,
        ))
        for one, more in zip(victims([15.0] * 12, [False] * 12, [False] * 12), spread, strict=True)
    ]  # fmt: skip
    data = dict(name="letters", sha256="0" * 64, train=1000, test=1000, modality="text")
    return cell(make, scores, defense=defense, shape=(16,), classes=2, data=data)


@pytest.mark.parametrize(
    ("in_place", "in_any_order", "blind", "level"),
    [
        (0.95, 0.95, 0.3, "rebuilt"),
        (0.1, 0.95, 0.3, "recognizable"),  # all names and numbers of the text, in another order
        (0.1, 0.35, 0.3, "blind"),
        (0.1, 0.95, 0.92, "blind"),  # texts that are alike
        (0.1, 0.95, None, "blind"),  # older records have the tokens in place alone
        (0.6, 0.65, 0.3, "recognizable"),
    ],
)
def test_texts_are_judged_by_their_tokens_in_place_and_in_any_order(fabricate, in_place, in_any_order, blind, level):
    none = leak_of([texts(fabricate, 1.0, 0.97, defense="none")], vouched=True)
    leak = leak_of([texts(fabricate, in_place, in_any_order, blind)], vouched=True, none=none)
    assert leak.level == level
    words = leak.everybody.amount_words(in_place, level == "rebuilt")
    mixed = level == "recognizable" and in_place < 0.5
    assert words == (
        f" at {in_any_order:.0%} of tokens in any order" if mixed else f" at {in_place:.0%} of tokens in place"
    )
