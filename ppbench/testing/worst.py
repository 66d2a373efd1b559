"""The worst figures of a defense in a sweep, and limits on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ppbench.questions.base import question_for
from ppbench.records.figure import best
from ppbench.records.schema import Record
from ppbench.report.cap import worst_caps
from ppbench.report.frame import ROW, Frame, frame_of
from ppbench.report.worst import Measured, attack_of, worst_of

FigureName = Literal["asr", "psnr", "labels", "cap"]


@dataclass(frozen=True)
class Worst:
    """The worst figure of one kind, with its 95 % interval if any: the smallest CAP, else the largest value."""

    value: float
    low: float | None
    high: float | None
    where: str

    def __str__(self) -> str:
        ends = "" if self.low is None or self.high is None else f" [{self.low:.3g}, {self.high:.3g}]"
        return f"{self.value:.3g}{ends} ({self.where})"


@dataclass(frozen=True)
class JudgedLimit:
    """A judged limit. kept: by the figure itself; sure: whether the whole interval is on that side of the limit."""

    kept: bool
    sure: bool
    sentence: str


def judge_limit(figure: FigureName, limit: float, worst: Worst | None) -> JudgedLimit:
    """Return whether a figure, without its interval, keeps its limit: a CAP at or above it, others at or below."""
    sign, name = (-1, f"min_{figure}={limit:g}") if figure == "cap" else (1, f"max_{figure}={limit:g}")
    if worst is None:
        lacking = "was requested, but no finished cell has such a figure; add attacks that give one, or leave"
        return JudgedLimit(False, False, f"{name} {lacking} the limit out")
    kept = sign * worst.value <= sign * limit
    sure = worst.low is not None and worst.high is not None and not worst.low <= limit <= worst.high
    doubt = "" if sure else "; undecided, for the limit lies within the interval: use more victims"
    return JudgedLimit(kept, sure, f"the worst {figure}, {worst}, {'is within' if kept else 'breaks'} {name}{doubt}")


def worst_figures(records: Sequence[Record], at: float | None = None) -> dict[str, Worst]:
    """Return the worst figures of a defense's complete cells by name, without oracles.

    asr: of membership; psnr: median dB, each victim by its best attack; labels: share recovered; cap: "recon/1" of
    these worst cases over the whole grid. All but cap are at the control value `at`, by default over all values.
    """
    frame = frame_of(records)
    at_value = [r for r in frame if at is None or (r.config.defense.control and r.config.defense.control.value == at)]
    images = frame.of([r for r in at_value if question_for(r).inputs])
    complete = [r for r in at_value if r.status == "complete"]
    psnr = worst_of((row.worst("psnr_median") for row in images.by(ROW).values()), "psnr_median")
    figures: dict[str, Worst | None] = {
        "asr": _worst(best(complete, "asr"), "asr"),
        "psnr": _worst(psnr, "psnr_median"),
        "labels": _worst(best(complete, "label_accuracy"), "label_accuracy"),
        "cap": _smallest_cap(frame),
    }
    return {name: worst for name, worst in figures.items() if worst is not None}


def _worst(top: Measured | None, name: str) -> Worst | None:
    metric = None if top is None else top.metric(name)
    if top is None or metric is None or metric.value is None:
        return None
    config, control = top.config, top.config.defense.control
    words = [attack_of(top), "" if control is None else f"{control.name}={control.value:g}", config.stage]
    words += [f"batch {config.batch_size}", config.threat_model.id, config.role]
    return Worst(metric.value, metric.low, metric.high, ", ".join(word for word in words if word))


def _smallest_cap(records: Frame) -> Worst | None:
    """Return the smallest CAP of the worst cases over the grid."""
    caps: list[Worst] = []
    for key, cap, _ in worst_caps([r for r in records if question_for(r).inputs]):
        if cap.value is not None:
            where = f"worst case over {cap.n} values of {key.control}, {key.stage}, batch {key.batch}"
            caps.append(Worst(cap.value, cap.low, cap.high, where))
    return min(caps, key=lambda worst: worst.value, default=None)
