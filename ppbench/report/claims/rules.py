"""Which rule judges claims about which metric, with its counterfactuals."""

from __future__ import annotations

from ppbench.federation.claim import Claim
from ppbench.report.claims import costs, use
from ppbench.report.claims.attacks import (
    IMAGES,
    members_stay_hidden,
    outputs_stay_hidden,
    pixels_stay_hidden,
)
from ppbench.report.claims.caps import cap_is_kept
from ppbench.report.claims.ends import (
    ClaimRule,
    if_accuracy_fell,
    if_accuracy_rose,
    if_all_leaked,
    if_flawless,
    if_lossless,
    if_nothing_leaked,
    if_useless,
)
from ppbench.report.claims.rivals import JUDGED_CELLS, leaks_less, learns_more, stays_farther

CAPS = ("cap_reconstruction", "cap_label", "cap_tracing")
RULES: dict[str, ClaimRule] = {
    "asr": ClaimRule(members_stay_hidden, if_all_leaked, if_nothing_leaked),
    **dict.fromkeys(IMAGES, ClaimRule(pixels_stay_hidden, if_all_leaked, if_nothing_leaked)),
    "agreement": ClaimRule(outputs_stay_hidden, if_all_leaked, if_nothing_leaked),
    **dict.fromkeys(CAPS, ClaimRule(cap_is_kept, if_all_leaked, if_nothing_leaked)),
    "accuracy": ClaimRule(use.accuracy_is_kept, if_useless, if_lossless, "middle"),
    "accuracy_top5": ClaimRule(use.top5_is_kept, if_useless, if_lossless, "middle"),
    "dice": ClaimRule(use.dice_is_kept, if_useless, if_lossless, "middle"),
    "mse": ClaimRule(use.error_is_kept, if_useless, if_lossless, "middle"),
    "accuracy_rises": ClaimRule(use.accuracy_rises, if_accuracy_fell, if_accuracy_rose),
    "accuracy_gain": ClaimRule(use.accuracy_is_gained, if_useless, if_flawless, "middle"),
    "epsilon": ClaimRule(use.guarantee_is_given),
    "upload_ratio": ClaimRule(costs.upload_is_as_large),
    "bytes_saving": ClaimRule(costs.bytes_are_saved),
    "memory_ratio": ClaimRule(costs.memory_is_as_small),
}
"""Rules of claims about one defense."""
RIVALS: dict[str, ClaimRule] = {
    **dict.fromkeys(CAPS, ClaimRule(stays_farther, if_all_leaked, if_nothing_leaked)),
    **dict.fromkeys(JUDGED_CELLS, ClaimRule(leaks_less, if_all_leaked, if_nothing_leaked)),
    **dict.fromkeys(
        ("accuracy", "accuracy_top5", "dice", "mse"), ClaimRule(learns_more, if_useless, if_lossless, "middle")
    ),
    "bytes_saving": ClaimRule(costs.sends_less),
}
"""Rules of claims to be better than another defense."""
UNJUDGED = {
    "feat_mse_mean": "the paper does not say whose features it means",
    "time_to_accuracy_ratio": "no training here stops at an accuracy",
    "client_forward_ratio": "no benchmark times forward passes alone",
    "server_update_ratio": "no benchmark times a server",
    "_seconds": "seconds of another machine do not compare",
}
"""Why no rule judges a metric that papers print, or all metrics with an ending: a clause."""


def unjudged_reason(metric: str) -> str:
    """Return why no rule judges a metric, a clause."""
    known = (why for name, why in UNJUDGED.items() if metric == name or (name[0] == "_" and metric.endswith(name)))
    return next(known, f"no rule judges {metric!r}")


def rule_of(claim: Claim) -> ClaimRule | None:
    """Return the rule that judges a claim, or None."""
    return (RULES if claim.than is None else RIVALS).get(claim.metric)
