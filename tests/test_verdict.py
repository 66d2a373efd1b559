"""What is said of a defense: every branch of the sentences, from records made by hand."""

import io
import itertools

import pytest
from rich.console import Console

from ppbench.commands.terminal import PLAIN_WIDTH, tables
from ppbench.records.figure import best
from ppbench.records.schema import Flag
from ppbench.report.controls import check_controls, rebuilt_share, widened
from ppbench.report.entries import badges_of
from ppbench.report.findings import members_fate, outputs_fate
from ppbench.report.knowing import Knowledge
from ppbench.report.leak import leaks_of
from ppbench.report.rows import model_rows, upload_rows
from ppbench.report.verdict import sentences
from ppbench.report.words import listed_values


def masked(make, **shares):
    """Return the cells of a masked defense at kappa = 100 by ASR; delivered: of the delivered model."""
    result = {"plain": 0.5, "knowing": 0.71, "none": 0.71, "delivered": 0.71} | shares
    results = []
    for stage in ("iterate", "final"):
        if result["none"] is not None:
            results.append(make("none", None, "mia_loss", "membership", result["none"], stage=stage))
        own = (result["plain"], result["knowing"]) if stage == "iterate" else (result["delivered"], None)
        for share, attack, adaptive in zip(own, ("mia_loss", "unmask_regression"), (False, True), strict=True):
            if share is not None:
                results.append(make("pbpfl", 100.0, attack, "membership", share, adaptive=adaptive, stage=stage))
    return results


def sentence_of(records, start, defense="pbpfl"):
    """Return the one sentence that begins so."""
    result = [s for s in sentences(defense, records) if s.startswith(start)]
    assert len(result) == 1, result
    assert result[0].endswith(").") or "tried" in result[0] or "un-masks" in result[0]
    return result[0]


HIDES = (
    "hides members, as far as tried here, from one who takes it as it is (mia_loss: ASR 50.0% [45.0, 55.0], undefended "
    "71.0% [66.3, 75.4])"
)
FALLS = ") but not from one who un-masks it (unmask_regression: ASR 71.0% [66.3, 75.4])."


@pytest.mark.parametrize(
    ("plain", "knowing", "none", "opening", "closing"),
    [
        (0.5, 0.71, 0.71, HIDES, FALLS),
        (0.5, 0.5, 0.71, "hides members, as far as tried here, from one who takes", ") and from one who un-masks it ("),
        (
            0.5,
            None,
            0.71,
            "hides members, as far as tried here, from one who takes",
            "; no attack that un-masks it was tried.",
        ),
        (0.7, 0.71, 0.71, "does not hide members, even from one who takes", "; it does not hide them from one who"),
        (
            0.7,
            0.5,
            0.71,
            "does not hide members, even from one who takes",
            "; the attacks tried here that un-mask it find none (unmask_",
        ),
        (0.7, None, 0.71, "does not hide members, even from one who takes", "71.0% [66.3, 75.4])."),
        (0.5, 0.71, 0.52, "leaves it undecided whether members are hidden", "; it does not hide them from one who"),
        (0.5, 0.5, 0.52, "leaves it undecided whether members are hidden", "; whether from one who un-masks it is und"),
        (0.5, 0.5, None, "leaves it undecided whether members are hidden", "; whether from one who un-masks it is und"),
        (None, 0.71, 0.71, "does not hide members from one who un-masks it (unmask_regression", "75.4])."),
        (
            None,
            0.5,
            0.71,
            "hides members, as far as tried here, from one who un-masks it (unmask_regression",
            "75.4]).",
        ),
        (0.54, None, 0.58, "leaves it undecided whether members are hidden", "; no attack that un-masks it was tried."),
    ],
)
def test_the_sentence_on_members_says_what_was_found_and_not_what_was_hoped(
    plain, knowing, none, opening, closing, fabricate
):
    text = sentence_of(masked(fabricate, plain=plain, knowing=knowing, none=none), "What clients train on")
    assert text.startswith(f"What clients train on {opening}") and closing in text, text
    beside = {0.71: "undefended 71.0% [66.3, 75.4]", 0.52: "not above chance itself", None: "undefended: not attacked"}
    assert beside.get(none, f"undefended {none or 0:.1%}") in text


def test_control_values_that_fare_alike_share_a_sentence(fabricate):
    records = masked(fabricate)
    for kappa, plain in ((10.0, 0.51), (1.0, 0.66)):
        records.append(fabricate("pbpfl", kappa, "mia_loss", "membership", plain, stage="iterate"))
        records.append(fabricate("pbpfl", kappa, "unmask_upload", "membership", 0.70, adaptive=True, stage="iterate"))
    weak = sentence_of(records, "What clients train on at kappa=1 ")
    strong = sentence_of(records, "What clients train on at kappa=10 and 100 ")
    assert "does not hide members, even from one who takes it as it is (mia_loss: ASR 66.0%" in weak
    assert "hides members" in strong and "mia_loss, kappa=10: ASR at most 51.0%" in strong
    assert "unmask_regression, kappa=100: ASR at most 71.0%" in strong


def test_the_largest_of_many_is_judged_at_the_level_of_all(fabricate):
    """55.5 % of 400 is above chance alone and not as the best of twenty."""
    one = fabricate("pbpfl", 1.0, "mia_loss", "membership", 0.555, stage="iterate")
    assert members_fate(one, 1, None) == "falls" and members_fate(one, 20, None) == "undecided"
    assert widened(one.metric("asr"), 20)[0] < 0.5 < widened(one.metric("asr"), 1)[0]
    many = masked(fabricate, plain=0.5, knowing=None)
    many += [fabricate("pbpfl", k / 10, "mia_loss", "membership", 0.555, stage="iterate") for k in range(1, 20)]
    texts = [s for s in sentences("pbpfl", many) if s.startswith("What clients train on")]
    assert texts and not any("does not hide" in text for text in texts)


def test_each_adversary_is_told_apart_and_never_the_control_as_the_defense(fabricate):
    records = masked(fabricate)
    listener = dict(stage="iterate", threat="eavesdropper/1")
    records.append(fabricate("none", None, "unmask_upload", "membership", 0.71, **listener))
    records.append(fabricate("pbpfl", 100.0, "unmask_upload", "membership", 0.5, adaptive=True, **listener))
    text = sentence_of(records, "[eavesdropper/1] What clients train on")
    assert "hides members, as far as tried here, from one who un-masks it (unmask_upload: ASR 50.0%" in text
    assert "but not from one who un-masks it (unmask_regression" in sentence_of(records, "What clients train on")
    records.append(fabricate("pbpfl", 100.0, "unmask_upload", "membership", 0.5, threat="eavesdropper/1"))
    assert not any(s.startswith("[eavesdropper/1] The delivered") for s in sentences("pbpfl", records))
    alone = [r for r in records if r.config.threat_model.id != "client/1"]
    assert sentence_of(alone, "[eavesdropper/1] The delivered model")


def outputs(make, plain, knowing, **more):
    results = []
    for share, attack, adaptive, error in ((plain, "query", False, 98.0), (knowing, "unmask_regression", True, 0.012)):
        if share is not None:
            kind = dict(adaptive=adaptive, stage="iterate", error=error) | more
            results.append(make("pbpfl", 100.0, attack, "extraction", share, **kind))
    return results


DROWNED = "(query: agrees with it on 10.0% [6.2, 15.0] of queries, relative error 98 times their size [98, 98])"
READ = "(unmask_regression: agrees with it on 100.0% [98.2, 100.0] of queries, relative error 1.2% [1.2, 1.2])."
HIDDEN = (
    f"hides the true model's decisions, as far as tried here, from one who takes it as it is {DROWNED} but not from "
    f"one who un-masks it {READ}"
)


@pytest.mark.parametrize(
    ("plain", "knowing", "opening", "closing"),
    [
        (0.1, 1.0, HIDDEN, ""),
        (
            0.1,
            0.7,
            "hides the true model's decisions, as far as tried here, from one",
            "but only in part from one who un-masks it",
        ),
        (0.1, 0.1, "hides the true model's decisions, as far as tried here, from one", "and from one who un-masks it"),
        (
            0.1,
            0.28,
            "hides the true model's decisions, as far as tried here, from one",
            "; whether from one who un-masks it is undecided",
        ),
        (0.6, 1.0, "hides the true model's decisions only in part from one", "; it does not hide them from one who"),
        (1.0, 1.0, "does not hide the true model's decisions, even from one", "; it does not hide them from one who"),
        (
            0.6,
            0.1,
            "hides the true model's decisions only in part from one",
            "; the attacks tried here that un-mask it find none",
        ),
        (0.6, 0.6, "hides the true model's decisions only in part from one", "; it hides them only in part from one"),
        (
            0.1,
            None,
            "hides the true model's decisions, as far as tried here, from one",
            "; no attack that un-masks it was tried.",
        ),
    ],
)
def test_the_sentence_on_outputs_says_what_was_found(plain, knowing, opening, closing, fabricate):
    text = sentence_of(outputs(fabricate, plain, knowing), "What clients train on")
    assert text.startswith(f"What clients train on {opening}") and closing in text, text


def test_a_model_without_classes_is_judged_by_its_error(fabricate):
    """With one output every query agrees, which says nothing."""
    numbers = dict(classes=1, shape=(16,), accuracy=None, mse=0.06)
    text = sentence_of(outputs(fabricate, 1.0, 1.0, **numbers), "What clients train on")
    assert (
        "hides the true model's predictions, as far as tried here, from one who takes it as it is (query: relative "
        "error 98 times" in text
    )
    assert "but not from one who un-masks it (unmask_regression: relative error 1.2%" in text
    for error, fate in ((0.012, "falls"), (0.3, "part"), (0.9, "stands")):
        assert outputs_fate(outputs(fabricate, None, 1.0, **numbers, error=error)[0], 1) == fate


def test_agreement_counts_beyond_the_best_constant_answer(fabricate):
    """On unbalanced classes a drowned model agrees with the true one wherever both name the frequent class."""

    def question(share, alike, error=98.0):
        kind = dict(adaptive=False, stage="iterate", error=error, classes=2)
        return fabricate("pbpfl", 100.0, "query", "extraction", share, alike=alike, **kind)

    assert question(0.95, None).metric("agreement").chance == 0.5 and outputs_fate(question(0.95, None), 1) == "part"
    constant = question(0.95, 0.95)
    assert constant.metric("agreement").chance == 0.95
    assert outputs_fate(constant, 1) not in ("falls", "part")
    assert outputs_fate(question(1.0, 0.5), 1) == "falls"
    for error, fate in ((0.012, "falls"), (98.0, "stands")):  # one decision for all: only the numbers can tell
        assert outputs_fate(question(1.0, 1.0, error), 1) == fate
    for share, alike, error, does in ((1.0, 0.95, 1e-7, "answers"), (0.4, None, 2.0, "does not answer")):
        final = fabricate("pbpfl", 1.0, "query", "extraction", share, alike=alike, error=error, classes=2)
        assert sentence_of([final], "The delivered model").startswith(
            f"The delivered model {does} as the true one does (query"
        )


@pytest.mark.parametrize(
    ("delivered", "none", "start"),
    [
        (0.71, 0.71, "The delivered model gives members away as the undefended one does (mia_loss: ASR 71.0%"),
        (0.62, 0.81, "The delivered model gives members away less than the undefended one does"),
        (0.85, 0.62, "The delivered model gives members away more than the undefended one does"),
        (0.71, None, "The delivered model gives members away (mia_loss: ASR 71.0% [66.3, 75.4], undefended: not"),
        (0.71, 0.52, "The delivered model gives members away (mia_loss: ASR 71.0% [66.3, 75.4], undefended 52.0%"),
        (0.50, 0.71, "The delivered model hides members from the attacks tried here"),
        (0.50, 0.52, "The delivered model is not shown to give members away, nor to hide them"),
    ],
)
def test_the_delivered_model_stands_beside_the_undefended_one(delivered, none, start, fabricate):
    assert sentence_of(masked(fabricate, delivered=delivered, none=none), "The delivered model").startswith(start)


def test_a_defense_without_a_mask_keeps_its_sentence(fabricate):
    records = [fabricate("none", None, "mia_loss", "membership", 0.71, stage="final")]
    for sigma, share in ((0.1, 0.6), (0.5, 0.5)):
        records.append(fabricate("dp", sigma, "mia_loss", "membership", share, stage="final", control="sigma"))
    text = sentence_of(records, "A client who queries the delivered model", "dp")
    assert "distinguishes members from others (mia_loss: ASR at most 60.0% [55.0, 64.8], undefended 71.0%" in text


def images(make, defense, value, db, **more):
    return make(defense, value, "dlg", "reconstruction", db, **more)


def test_a_server_that_recovers_the_gradient_is_told_as_fedsgd_once_for_all_control_values(fabricate):
    iterate = fabricate("pbpfl", 1.0, "mia_loss", "membership", 0.5, stage="iterate")
    records = [images(fabricate, "none", None, 35.0), iterate]
    records += [images(fabricate, "pbpfl", k, db) for k, db in ((1.0, 35.0), (100.0, 34.5))]
    assert sentence_of(records, "To the server this is FedSGD").startswith(
        "To the server this is FedSGD over the whole grid: images are rebuilt as they are without a defense (dlg, "
        "kappa=100: at least 35.5 dB [34.5, 36.5], undefended 36.0 dB [35.0, 37.0]); batch 1, before training; "
        "accuracy 95.0%"
    )


@pytest.mark.parametrize(
    ("db", "none", "upload", "start"),
    [
        (8.0, 35.0, "gradient", "the attacks tried here see no more of images than a blind guess (best: dlg: 9.0 dB"),
        (
            12.0,
            35.0,
            "gradient",
            "whether images leak is undecided (best: dlg: 13.0 dB [12.0, 14.0], blind guess 11",
        ),
        (16.0, 35.0, "gradient", "images are recognizable (100% [74, 100] found among 500 others, chance 0.2%; 100% ["),
        (25.0, 35.0, "gradient", "images are rebuilt, even by an unaware attacker (dlg: 26.0 dB"),
        (35.0, 35.0, "delta", "images are rebuilt, even by an unaware attacker (dlg: 36.0 dB"),
        (35.0, 12.0, "gradient", "images are rebuilt, even by an unaware attacker (dlg: 36.0 dB"),
    ],
)
def test_it_is_fedsgd_only_where_images_are_rebuilt_as_the_undefended_ones(db, none, upload, start, fabricate):
    iterate = fabricate("pbpfl", 1.0, "mia_loss", "membership", 0.5, stage="iterate")
    records = [images(fabricate, "none", None, none), iterate, images(fabricate, "pbpfl", 1.0, db, upload=upload)]
    result = sentences("pbpfl", records)
    assert result[0].startswith(f"pbpfl at kappa=1: {start}") and not any("FedSGD" in sentence for sentence in result)
    bare = [images(fabricate, d, v, 35.0) for d, v in (("none", None), ("dp", 0.0))]
    assert sentences("dp", bare)[0].startswith("dp at kappa=0: images are rebuilt, even by"), (
        "only a masked one is FedSGD"
    )


def test_rows_of_tables_are_told_by_their_error_and_their_model_by_its_mse(fabricate):
    numbers = dict(classes=1, shape=(16,), accuracy=None)
    records = [fabricate("none", None, "analytic", "reconstruction", 90.0, error=1e-4, mse=0.0601, **numbers)]
    records += [
        fabricate("dp", 0.1, attack, "reconstruction", db, error=error, mse=0.0702, control="sigma", **numbers)
        for attack, db, error in (("analytic", 34.0, 0.8), ("dlg", 33.0, 0.3))
    ]
    (row,) = [r for r in upload_rows(records, leaks_of(records, Knowledge())) if r.key.defense == "dp"]
    assert row.leak.worst.config.attack.id == "dlg", "the smaller error leaks more, whatever the decibels"
    assert sentences("dp", records)[0] == (
        "dp at sigma=0.1: whether table rows leak is undecided, mean relative error 0.30 [0.30, 0.30] (dlg); "
        "whether columns come out right was not measured; no attack here is shown to know the defense; batch 1, "
        "before training; MSE 0.0702 (0.0601 undefended)."
    )
    assert "diverged" not in " ".join(sentences("dp", records))
    label = fabricate("dp", 0.1, "label_recovery", "label", 1.0, control="sigma", mse=0.0702, **numbers)
    assert sentences("dp", [*records, label]) == sentences("dp", records), "numbers are no labels"


LEAK = "Psi and Phi travel without noise, so the exact gradient can be rebuilt"
FEW = "5 clients are too few for any of the theorem's conditions"


@pytest.mark.parametrize(
    ("reasons", "sentence"),
    [
        ({e: f"{LEAK}; epsilon {e:g} a round is claimed." for e in (10.0, 1.0)}, f"{LEAK}; epsilon 1 / 10 a round is"),
        ({10.0: f"{LEAK}; epsilon 10 a round is claimed."}, f"{LEAK}; epsilon 10 a round is claimed."),
        ({1.0: f"Psi is bare; {FEW}", 3.0: "Psi is bare"}, f"Psi is bare; epsilon=1: {FEW}."),
        ({3.0: "Psi is bare", 9.0: "x"}, "epsilon=3: Psi is bare; epsilon=9: x."),
    ],
)
def test_reasons_that_differ_over_the_grid_share_what_they_share(reasons, sentence, fabricate):
    records = [
        fabricate("mpdp", e, "dlg", "reconstruction", 12.0, control="epsilon", reason=reason)
        for e, reason in reasons.items()
    ]
    assert sentences("mpdp", records)[-1].startswith(f"No epsilon can be given: {sentence}")


def test_a_guarantee_at_some_control_values_only_is_told_as_such(fabricate):
    records = [
        fabricate("dp", 1.0, "dlg", "reconstruction", 12.0, control="sigma", epsilon=3.0),
        fabricate("dp", 0.0, "dlg", "reconstruction", 12.0, control="sigma", reason="there is no noise"),
    ]
    assert listed_values(["kappa=1 families=shared", "kappa=2"]) == "kappa=1 families=shared and kappa=2"
    assert sentences("dp", records)[-2:] == [
        "Formal guarantee over the whole training: epsilon 3 for a single example.",
        "No epsilon can be given at sigma=0: there is no noise.",
    ]


def checks(records):
    return {check.control: check.ok for check in check_controls(records)}


@pytest.mark.parametrize(("share", "ok"), [(0.71, True), (0.52, False)])
def test_where_only_membership_was_asked_the_undefended_model_must_give_members_away(share, ok, fabricate):
    some = [("none", share, "iterate"), ("none", share, "final"), ("full_noise", 0.5, "final")]
    result = check_controls([fabricate(d, None, "mia_loss", "membership", s, stage=at) for d, s, at in some])
    assert [check.ok for check in result] == [ok, True]
    assert ("finds members" if ok else "is NOT shown to find members") in result[0].sentence
    assert f"mia_loss: ASR {share:.1%} [" in result[0].sentence


def test_what_the_controls_vouch_for(fabricate):
    """Extraction for nothing, members where they alone were asked, reconstructions before them; and noise alarms."""
    records, none, loud = (fabricate(d, None, "mia_loss", "membership", share)
                         for d, share in (("none", 0.9), ("none", 0.5), ("full_noise", 0.7)))  # fmt: skip
    read = [fabricate(d, None, "query", "extraction", 1.0, stage="iterate") for d in ("none", "full_noise")]
    hidden = fabricate("full_noise", None, "mia_loss", "membership", 0.5)
    assert checks(read) == {"none": None, "full_noise": None}
    assert checks([*read, none, hidden]) == {"none": False, "full_noise": True}
    assert checks([records, images(fabricate, "none", None, 12.0)])["none"] is False
    assert checks([records, images(fabricate, "none", None, 35.0)])["none"] is True
    assert checks([loud])["full_noise"] is False


def test_a_table_row_is_rebuilt_within_a_tenth_whatever_its_decibels(fabricate):
    near = fabricate("none", None, "analytic", "reconstruction", 5.0, error=0.09, shape=(16,))
    far = fabricate("none", None, "analytic", "reconstruction", 45.0, error=0.2, shape=(16,))
    assert rebuilt_share(near).value == 1 and rebuilt_share(far).value == 0
    assert rebuilt_share(images(fabricate, "none", None, 35.0)).value == 1
    assert rebuilt_share(fabricate("none", None, "mia_loss", "membership")) is None
    assert best([far, near], "rmse_mean") is near


def printed(records):
    console = Console(width=PLAIN_WIDTH, file=io.StringIO(), force_terminal=False)
    for table in tables(records):
        console.print(table)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_the_tables_fit_and_hold_plain_and_worst_side_by_side(fabricate):
    records = masked(fabricate)
    for defense, stage in itertools.product(("none", "full_noise", "mpdp"), ("iterate", "final")):
        knows = defense == "mpdp"
        about = (1000.0, "epsilon") if knows else (None, "")
        more = dict(stage=stage, control=about[1])
        records.append(fabricate(defense, about[0], "query", "extraction", 0.1, error=98.7, **more))
        records.append(fabricate(defense, about[0], "extract_data_free", "extraction", 1.0, adaptive=knows, **more))
        records.append(fabricate(defense, about[0], "unmask_projection", "membership", 0.71, adaptive=knows, **more))
    records += [
        images(fabricate, d, v, 35.0, batch=8) for d, v in (("none", None), ("full_noise", None), ("pbpfl", 100.0))
    ]
    records.append(
        fabricate("none", None, "unmask_upload", "membership", 0.7, stage="iterate", threat="eavesdropper/1")
    )
    page = printed(records)
    assert max(map(len, page)) <= PLAIN_WIDTH <= 120
    text = "\n".join(page)
    for words in ("trained on", "delivered", "ASR", "AUC", "agrees", "unmask_regression", "kappa=100", "66-75%",
                  "98-100%", "extract_data_free", "eavesdropper"):  # fmt: skip
        assert words in text, words
    assert "…" not in text


def test_models_of_numbers_and_trainings_that_diverged(fabricate):
    numbers = dict(classes=1, shape=(16,), accuracy=None, mse=0.0601)
    records = [fabricate("pbpfl", 1.0, "analytic", "reconstruction", 30.0, error=0.25, **numbers)]
    text = "\n".join(printed([*records, *outputs(fabricate, 1.0, 1.0, **numbers)]))
    assert all(word in text for word in ("MSE", "0.0601", "0.25", "error"))
    assert not any(word in text for word in ("agrees", "accuracy", "PSNR"))
    broken = dict(status="diverged", accuracy=None)
    records = [fabricate("pbpfl", 1.0, "dlg", "reconstruction", **broken)]
    records.append(fabricate("pbpfl", 1.0, "mia_loss", "membership", stage="iterate", **broken))
    assert "\n".join(printed(records)).count("diverged") == 2 and len(model_rows(records)) == 1
    undecided = "pbpfl at kappa=1: whether images leak is undecided, because no attack gave a figure; batch 1, "
    assert sentences("pbpfl", records)[0] == undecided + "before training; training diverged."


@pytest.mark.parametrize("code", ["own_account", "own_weights", "probe_noticed"])
@pytest.mark.parametrize(
    ("decibels", "honest", "says"),
    [
        (8.0, "the attacks tried here see no more of images than a blind guess", "whether images leak is undecided"),
        (16.0, "images are recognizable", "images are recognizable"),
        (40.0, "images are rebuilt", "images are rebuilt"),
    ],
)
def test_what_belies_a_defense_stands_in_its_sentence(code, decibels, honest, says, fabricate):
    """Nobody is protected by a false account: what no attack finds cannot be told then."""
    none = [images(fabricate, "none", None, 35.0, batch=batch) for batch in (1, 4)]
    record = fabricate("ppdl", 0.3, "dlg", "reconstruction", decibels, control="theta")
    remark = Flag(code=code, severity="warning", detail="the account is belied")
    lying = record.model_copy(update={"flags": [remark]})
    (plain, *_), (result, *_) = (sentences("ppdl", [*none, r]) for r in (record, lying))
    assert result.startswith(f"ppdl at theta=0.3: {says} (") or result.startswith(
        f"ppdl at theta=0.3: {says}, even by "
    )
    assert "; the account is belied; batch 1" in result
    assert "belied" not in plain and plain.startswith(f"ppdl at theta=0.3: {honest}")
    larger = fabricate("ppdl", 0.3, "dlg", "reconstruction", decibels, control="theta", batch=4)
    both = [lying, larger.model_copy(update={"flags": [remark]})]
    (batches,) = [s for s in sentences("ppdl", [*none, *both]) if s.startswith("In batches of 4, ")]
    assert batches.startswith(f"In batches of 4, {says}: at most ") and "; the account is belied." in batches
    assert not any("no more of images" in sentence for sentence in sentences("ppdl", [*none, *both]))
    assert [badge.text for badge in badges_of(both, Knowledge())] == ["plain attacks only", "belied"]
