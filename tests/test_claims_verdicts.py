"""A verdict that no result could change is none: of planted records every rule says each of its verdicts."""

from dataclasses import replace

import pytest
from test_claims import (
    ACCURACY,
    DICE,
    EPSILON,
    ERROR,
    MEMORY,
    RISES,
    SAVING,
    UPLOAD,
    costing,
    grid,
    guarded,
    in_slices,
    kept,
    numbers,
    sending,
)
from test_claims_ends import KINDS, RIVAL, planted, verdict
from test_claims_ends import ONE as ATTACKED

from ppbench.claims.rules import RIVALS, RULES

VERDICTS = ("falls", "holds", "inconclusive")
COUNTED = ("epsilon", "upload_ratio", "bytes_saving")
"""Figures that follow from the protocol, to the byte, so that each of them tells."""
LOST = ((0.60, 0.005), (0.83, 0.005), (0.82, 0.04))
"""Our share of right answers beside .84 undefended, and to what it is known, for each of `VERDICTS`."""
GAIN, TOP5 = replace(ACCURACY, metric="accuracy_gain", value=0.02), replace(ACCURACY, metric="accuracy_top5")


def measured(make, ours, none, within=0.005, name="accuracy"):
    """Return two trainings whose figures are known to `within` on either side."""
    prefix = "" if name == "accuracy" else f"{name}_"
    result = kept(make, ours, none, name)
    ends = [{f"{prefix}low": value - within, f"{prefix}high": value + within} for value in (none, ours)]
    pairs = zip(result, ends, strict=True)
    return [record.model_copy(update={"utility": record.utility.model_copy(update=end)}) for record, end in pairs]


TRAINED = {
    "accuracy": (ACCURACY, measured, *((ours, 0.84, by) for ours, by in LOST)),
    "accuracy_top5": (TOP5, measured, *((ours, 0.84, by, "accuracy_top5") for ours, by in LOST)),
    "dice": (DICE, measured, *((ours, 0.84, by, "dice") for ours, by in LOST)),
    "mse": (ERROR, numbers, (0.09,), (0.061,), (0.0625,)),
    "accuracy_rises": (RISES, grid, *(({1.0: 0.8, 9.0: last},) for last in (0.5, 0.9, 0.81))),
    "accuracy_gain": (GAIN, measured, (0.80, 0.83), (0.86, 0.83), (0.86, 0.83, 0.04)),
    "epsilon": (EPSILON, lambda make, epsilon: guarded(make, epsilon=epsilon), (9.3,), (2.5,)),
    "upload_ratio": (UPLOAD, sending, (6000.0, "float32"), (3000.0, "float32")),
    "bytes_saving": (SAVING, costing, (378.0,), (375.0,)),
    "memory_ratio": (MEMORY, in_slices, (32, 126), (32, 9), (8, 9)),
}
"""By metric: a claim, the maker of records, and what it is told in order to plant each of `VERDICTS`."""


def beside(make, metric, ours, theirs):
    """Return trainings of the undefended model, of the defense, and of the rival."""
    if metric == "bytes_saving":
        none, mine, other = (*costing(make, ours), costing(make, theirs)[1])
    else:
        made = [numbers(make, one) if metric == "mse" else kept(make, one, 0.9, metric) for one in (ours, theirs)]
        (none, mine), (_, other) = made
    about = other.config.defense.model_copy(update={"id": RIVAL.defense})
    config = other.config.model_copy(update={"defense": about})
    return [none, mine, other.model_copy(update={"config": config, "cell_id": config.cell_id()})]


@pytest.mark.parametrize("metric", RULES)
def test_every_rule_has_records_of_which_a_claim_falls_holds_and_cannot_be_told(metric, fabricate):
    if metric in KINDS:
        claim = ATTACKED[metric]
        made = [planted(fabricate, "pbpfl", claim, share) for share in (1.0, 0.0, 0.0)]
        made[2] = [r for r in made[2] if not r.config.attack.adaptive]
    else:
        claim, maker, *result = TRAINED[metric]
        made = [maker(fabricate, *words) for words in result]
    results = [verdict("pbpfl", claim, records).verdict for records in made]
    assert tuple(results) == VERDICTS[: 2 if metric in COUNTED else 3]


@pytest.mark.parametrize("metric", RIVALS)
def test_every_rule_of_rivals_has_records_of_which_a_claim_falls_holds_and_cannot_be_told(metric, fabricate):
    if metric in KINDS:
        claim = replace(ATTACKED[metric], than=RIVAL)
        made = [planted(fabricate, "pbpfl", claim, *ends) for ends in ((1.0, 0.0), (0.0, 1.0), (0.5, 0.5))]
    else:
        claim = replace(TRAINED[metric][0], than=RIVAL)
        worse, better = {"mse": (0.09, 0.061), "bytes_saving": (900.0, 300.0)}.get(metric, (0.6, 0.8))
        made = [beside(fabricate, metric, *pair) for pair in ((worse, better), (better, worse), (better, better))]
    results = [verdict("pbpfl", claim, records) for records in made]
    assert tuple(result.verdict for result in results[:2]) == VERDICTS[:2]
    same = results[2]
    assert same.verdict == ("falls" if metric == "bytes_saving" else "inconclusive"), "as many bytes are not fewer"
    assert metric not in KINDS or "+0.00 [" in same.reason.replace("-0.00", "+0.00"), "victim by victim"


def test_of_two_models_none_is_better_where_the_undefended_one_learned_nothing(fabricate):
    claim = replace(TRAINED["accuracy"][0], than=RIVAL)
    records = beside(fabricate, "accuracy", 0.8, 0.6)
    assert verdict("pbpfl", claim, records).verdict == "holds"
    none = records[0]
    chance = {"accuracy": 0.1, "low": 0.09, "high": 0.11}
    untaught = none.model_copy(update={"utility": none.utility.model_copy(update=chance)})
    result = verdict("pbpfl", claim, [untaught, *records[1:]])
    assert result.verdict == "inconclusive" and "the undefended model has learned nothing" in result.reason
