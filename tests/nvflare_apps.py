"""Filters as somebody has them who runs NVFlare: `nvflare:nvflare_apps:NAME` in tests/test_nvflare.py."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.dxo_filter import DXOFilter
from nvflare.apis.filter import Filter
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.filters import ExcludeVars, PercentilePrivacy


def nothing() -> Any:
    """No filter at all."""
    return []


class Gaussian(DXOFilter):
    """Clips each change to a norm, and adds noise from NumPy's global generator and Python's."""

    def __init__(self, clip: float, noise: float) -> None:
        super().__init__([DataKind.WEIGHT_DIFF], [DataKind.WEIGHT_DIFF])
        self.clip, self.noise = clip, noise

    def process_dxo(self, dxo: Any, shareable: Any, fl_ctx: Any) -> Any:
        norm = np.sqrt(sum(float((v.astype(np.float64) ** 2).sum()) for v in dxo.data.values()))
        factor = min(1.0, self.clip / norm)
        for name, value in dxo.data.items():
            drawn = np.random.normal(0, self.noise, value.shape) + self.noise * random.gauss(0, 1)
            dxo.data[name] = (value * factor + drawn).astype(np.float32)
        return dxo


def mine(scale: float = 0.01, clip: float = 1.0) -> Any:
    """Local noise on clipped changes."""
    return [Gaussian(clip, scale)]


def chain(percentile: float = 50.0) -> Any:
    return [PercentilePrivacy(percentile, 1.0), ExcludeVars(["head.bias"])]


class Feedback(DXOFilter):
    """Sends the larger half, and keeps the rest for the next round."""

    def __init__(self) -> None:
        super().__init__(None, None)
        self.rest: dict[str, Any] = {}
        self.calls = 0

    def process_dxo(self, dxo: Any, shareable: Any, fl_ctx: Any) -> Any:
        self.calls += 1
        for name, value in dxo.data.items():
            whole = value + self.rest.get(name, 0)
            kept = np.abs(whole) >= np.median(np.abs(whole))
            self.rest[name], dxo.data[name] = np.where(kept, 0, whole), np.where(kept, whole, 0)
        dxo.set_meta_prop("calls", self.calls)
        return dxo


def feedback() -> Any:
    return [Feedback()]


class Whole(Filter):
    """Does to a whole result what it is told."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def process(self, shareable: Any, fl_ctx: Any) -> Any:
        return self.change(shareable, fl_ctx)


def _whole(change: Any) -> Any:
    return [Whole(change)]


def _changed(change: Any) -> Any:
    def process(shareable: Any, fl_ctx: Any) -> Any:
        data = dict(from_shareable(shareable).data)
        change(data)
        return DXO(DataKind.WEIGHT_DIFF, data).update_shareable(shareable)

    return _whole(process)


def sees() -> Any:
    """Refuses a context that is not one of NVFlare's tasks."""

    def process(shareable: Any, fl_ctx: Any) -> Any:
        names = (fl_ctx.get_identity_name(), fl_ctx.get_peer_context().get_identity_name(), fl_ctx.get_job_id())
        assert names[0].startswith("site-") and names[1:] == ("server", "ppbench"), names
        assert fl_ctx.get_prop("current_round") >= 1
        return shareable

    return _whole(process)


def raises() -> Any:
    def process(shareable: Any, fl_ctx: Any) -> Any:
        raise KeyError("no such key")

    return _whole(process)


def no_dxo() -> Any:
    return _whole(lambda shareable, fl_ctx: Shareable())


def no_shareable() -> Any:
    return _whole(lambda shareable, fl_ctx: None)


def blocks() -> Any:
    return _whole(lambda shareable, fl_ctx: make_reply("EXECUTION_EXCEPTION"))


def weights() -> Any:
    return _whole(lambda s, fl_ctx: DXO(DataKind.WEIGHTS, dict(from_shareable(s).data)).update_shareable(s))


def shapes() -> Any:
    return _changed(lambda data: data.update({"head.bias": data["head.bias"][:3]}))


def integers() -> Any:
    return _changed(lambda data: data.update({"head.bias": data["head.bias"].astype(np.int64)}))


def strange_names() -> Any:
    return _changed(lambda data: data.update({"tail": data["head.bias"]}))


def no_arrays() -> Any:
    return _changed(lambda data: data.update({"head.bias": object()}))


def no_steps() -> Any:
    def process(shareable: Any, fl_ctx: Any) -> Any:
        dxo = from_shareable(shareable)
        dxo.set_meta_prop("NUM_STEPS_CURRENT_ROUND", -2)
        return dxo.update_shareable(shareable)

    return _whole(process)


def not_a_list() -> Any:
    return PercentilePrivacy()


def not_filters() -> Any:
    return [PercentilePrivacy(), "ExcludeVars"]


def alone() -> Any:
    return None


def no_default(scale: float) -> Any:
    return []


def refuses(scale: float = -1.0) -> Any:
    raise ValueError("the noise must not be negative")


def shadows(noise: float = 1.0) -> Any:
    return mine(noise)


class Generator(Feedback):
    """Keeps what cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = np.random.default_rng(0)


def uncopied() -> Any:
    return [Generator()]


def own_draws() -> Any:
    made = Feedback()
    made.draws = random.Random(0)
    return [made]


number = 3
