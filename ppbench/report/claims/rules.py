"""Which rule judges claims about which metric, and what could have come out in the same setting."""

from __future__ import annotations

from ppbench.federation.claim import Claim
from ppbench.report.claims import costs, use
from ppbench.report.claims.attacks import (
    IMAGES,
    members_stay_hidden,
    outputs_stay_hidden,
    pixels_stay_hidden,
)
from ppbench.report.claims.caps import calibrated
from ppbench.report.claims.ends import Rule, falling, flawless, leaking, lossless, rising, silent, useless
from ppbench.report.claims.rivals import OF, leaks_less, learns_more, stays_farther

CAPS = ("cap_reconstruction", "cap_label", "cap_tracing")
RULES: dict[str, Rule] = {
    "asr": Rule(members_stay_hidden, leaking, silent),
    **dict.fromkeys(IMAGES, Rule(pixels_stay_hidden, leaking, silent)),
    "agreement": Rule(outputs_stay_hidden, leaking, silent),
    **dict.fromkeys(CAPS, Rule(calibrated, leaking, silent)),
    "accuracy": Rule(use.accuracy_is_kept, useless, lossless, "middle"),
    "accuracy_top5": Rule(use.top5_is_kept, useless, lossless, "middle"),
    "dice": Rule(use.dice_is_kept, useless, lossless, "middle"),
    "mse": Rule(use.error_is_kept, useless, lossless, "middle"),
    "accuracy_rises": Rule(use.accuracy_rises, falling, rising),
    "accuracy_gain": Rule(use.accuracy_is_gained, useless, flawless, "middle"),
    "epsilon": Rule(use.guarantee_is_given),
    "upload_ratio": Rule(costs.upload_is_as_large),
    "bytes_saving": Rule(costs.bytes_are_saved),
    "memory_ratio": Rule(costs.memory_is_as_small),
}
"""Rules of claims about one defense."""
RIVALS: dict[str, Rule] = {
    **dict.fromkeys(CAPS, Rule(stays_farther, leaking, silent)),
    **dict.fromkeys(OF, Rule(leaks_less, leaking, silent)),
    **dict.fromkeys(("accuracy", "accuracy_top5", "dice", "mse"), Rule(learns_more, useless, lossless, "middle")),
    "bytes_saving": Rule(costs.sends_less),
}
"""Rules of claims to be better than another defense."""
UNJUDGED = {
    "feat_mse_mean": "the paper does not say whose features it means",
    "time_to_accuracy_ratio": "no training here stops at an accuracy",
    "client_forward_ratio": "no benchmark times forward passes alone",
    "server_update_ratio": "no benchmark times a server",
    "_seconds": "seconds of another machine stand beside nothing",
}
"""Why nothing judges a metric that papers print, or all of one ending: a clause."""


def unjudged(metric: str) -> str:
    """Return why no rule judges a metric, a clause."""
    known = (why for name, why in UNJUDGED.items() if metric == name or (name[0] == "_" and metric.endswith(name)))
    return next(known, f"no rule judges {metric!r}")


def rule_of(claim: Claim) -> Rule | None:
    """Return the rule that judges a claim, or None."""
    return (RULES if claim.than is None else RIVALS).get(claim.metric)
