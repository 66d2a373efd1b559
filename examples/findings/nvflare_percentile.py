"""What PercentilePrivacy and ExcludeVars let out, beside what is said of them. NVFlare and NumPy alone; a second.

A client of a linear softmax classifier takes one step on one image; the change of its weights passes the filter with
its defaults. Row c of the change is a_c x, that of the bias a_c = -rate (p_c - y_c): any row that is not cut off gives
the image by a division, and the only entry of the bias that goes up is the label's.

    python examples/findings/nvflare_percentile.py
"""

from __future__ import annotations

import logging
from importlib import metadata
from typing import Any

import numpy as np
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.filter import Filter
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.filters import ExcludeVars, PercentilePrivacy

CLASSES, PIXELS, RATE = 10, 784, 0.1


def passed(made: Filter, update: dict[str, Any], kind: str = DataKind.WEIGHT_DIFF) -> dict[str, Any]:
    """Return what a filter lets out of an update."""
    data = {name: value.copy() for name, value in update.items()}
    dxo = DXO(kind, data=data, meta={MetaKey.NUM_STEPS_CURRENT_ROUND: 1})
    return dict(from_shareable(made.process(dxo.to_shareable(), FLContext())).data)


def step(image: Any, label: int, draws: Any) -> dict[str, Any]:
    """Return the change of the weights in one step on one image."""
    weight = draws.normal(0, 0.01, (CLASSES, PIXELS))
    logits = weight @ image
    p = np.exp(logits - logits.max())
    p /= p.sum()
    a = -RATE * (p - np.eye(CLASSES)[label])
    return {"weight": np.outer(a, image).astype(np.float32), "bias": a.astype(np.float32)}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two updates are the same."""
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def main() -> None:
    """Print all findings."""
    logging.disable(logging.ERROR)
    print(f"nvflare {metadata.version('nvflare')}\n")
    draws = np.random.default_rng(0)
    errors, labels, shares = [], 0, []
    for _ in range(50):
        image, label = draws.random(PIXELS), int(draws.integers(CLASSES))
        update = step(image, label, draws)
        out = passed(PercentilePrivacy(), update)
        shares.append(np.mean([np.mean(value != 0) for value in out.values()]))
        labels += int(out["bias"].argmax() == label)
        whole = np.abs(out["bias"]) < 0.00999  # not cut off at gamma
        row = int(np.argmax(np.where(whole, np.abs(out["bias"]), 0)))
        seen = (out["weight"][row] != 0) & (np.abs(out["weight"][row]) < 0.00999)
        guess = np.where(seen, out["weight"][row] / out["bias"][row], 0.05)  # what is left out is small
        errors.append(float(np.mean((guess - image) ** 2)))
    psnr = float(np.mean(-10 * np.log10(np.array(errors))))
    print(
        f"1. Defaults (percentile=10, gamma=.01): {np.mean(shares):.0%} of a variable's entries are sent on the mean;"
    )
    print(f"   one step on one image: label read in {labels} of 50, image at {psnr:.1f} dB by one division a pixel")
    small = {"w": np.array([0.001, -0.002, 0.004, 0.02], dtype=np.float32)}
    print(
        f"2. 'Any weight diff with abs<gamma will become 0': {small['w']} -> {passed(PercentilePrivacy(), small)['w']}"
    )
    again = same(passed(PercentilePrivacy(50), update), passed(PercentilePrivacy(50), update))
    print(f"3. Two calls give the same: {again}. Nothing is drawn, so no epsilon belongs to it")
    for title, made, kind in (
        ("PercentilePrivacy(percentile=101)", PercentilePrivacy(percentile=101), DataKind.WEIGHT_DIFF),
        ("PercentilePrivacy(gamma=0)", PercentilePrivacy(gamma=0), DataKind.WEIGHT_DIFF),
        ("PercentilePrivacy() on METRICS", PercentilePrivacy(), DataKind.METRICS),
        ("ExcludeVars('conv'), which matches nothing", ExcludeVars("conv"), DataKind.WEIGHT_DIFF),
        ("ExcludeVars(['biass']), which matches nothing", ExcludeVars(["biass"]), DataKind.WEIGHT_DIFF),
        ("ExcludeVars(('bias',)), a tuple", ExcludeVars(("bias",)), DataKind.WEIGHT_DIFF),
    ):
        print(f"4. {title}: all is sent as it is: {same(passed(made, update, kind), update)}")
    out = passed(ExcludeVars("bias"), update)
    rows = out["weight"].sum(1)
    print(f"5. ExcludeVars('bias'): the label is the weight's only row that goes up: {int(rows.argmax()) == label}")


if __name__ == "__main__":
    main()
