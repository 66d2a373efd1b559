"""Sweeps for tests: the request of a marker, its sweep, cached until code changes, and the verdict."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from ppbench.base.errors import UsageError, unknown
from ppbench.base.registry import canonical
from ppbench.questions.base import question_for
from ppbench.records.figure import best
from ppbench.records.schema import Record
from ppbench.report.cap import worst_caps
from ppbench.report.frame import ROW, Frame, frame_of
from ppbench.report.worst import Measured, attack_of, worst_of

if TYPE_CHECKING:
    from ppbench.report.compare.outcome import Comparison
    from ppbench.run.sweep import SweepResult


# -- The worst figures of a defense in a sweep, and limits on them --

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


@dataclass(frozen=True)
class Request:
    """The arguments of `@pytest.mark.ppbench(...)`.

    only: filters of cells beside the defense, as {"stage": ("init",)}; at: the control value for the limits on asr,
    psnr and labels, None: every one; max_asr: of every membership attack; max_labels: the share recovered; max_psnr: dB
    of the median victim, each by its best attack; min_cap: "recon/1" of these worst cases over the grid.
    """

    defense: str
    suite: str = "digits-quick"
    preset: str = ""
    only: tuple[tuple[str, tuple[str, ...]], ...] = ()
    at: float | None = None
    max_asr: float | None = None
    max_psnr: float | None = None
    max_labels: float | None = None
    min_cap: float | None = None

    @property
    def limits(self) -> dict[FigureName, float]:
        """The limits that are set, by figure."""
        limits = {"asr": self.max_asr, "psnr": self.max_psnr, "labels": self.max_labels, "cap": self.min_cap}
        return {cast("FigureName", figure): limit for figure, limit in limits.items() if limit is not None}

    @property
    def filters(self) -> dict[str, tuple[str, ...]]:
        """Filters for the sweep, the defense among them."""
        return {**dict(self.only), "defense": (self.defense,)}


def request_from(keywords: Mapping[str, Any]) -> Request:
    """Return the request of a marker's keywords; UsageError: one is unknown, missing or malformed."""
    known = [field.name for field in fields(Request)]
    for name in keywords:
        if name not in known:
            raise unknown("argument of pytest.mark.ppbench", name, known)
    if not isinstance(keywords.get("defense"), str):
        raise UsageError("pytest.mark.ppbench names no defense; give one, as @pytest.mark.ppbench(defense='dp').")
    for name in ("at", "max_asr", "max_psnr", "max_labels", "min_cap"):
        value = keywords.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise UsageError(f"pytest.mark.ppbench: {name}={value!r} cannot be used; give a number.")
    only = keywords.get("only") or {}
    if not isinstance(only, Mapping) or "defense" in only:
        raise UsageError(
            f"pytest.mark.ppbench: only={only!r} cannot be used; give filters as {{'stage': ['init']}}, and the "
            "defense as defense=..."
        )
    lists = {key: (v,) if isinstance(v, str) else tuple(v) for key, v in sorted(only.items())}
    filters = tuple((k, tuple(f"{v:g}" if isinstance(v, float) else str(v) for v in some)) for k, some in lists.items())
    named = {"defense": canonical(keywords["defense"]), "suite": str(keywords.get("suite", "digits-quick"))}
    return Request(**{**keywords, **named, "only": filters})


@dataclass(frozen=True)
class Results:
    """The judged sweep that the fixture `ppbench` passes to a marked test.

    records: the defense's own cells; worst: their worst figures by name; judged: the request's limits, judged.
    """

    request: Request
    swept: SweepResult
    records: tuple[Record, ...]
    worst: Mapping[str, Worst]
    judged: tuple[JudgedLimit, ...]
    baseline: Path | None = None

    @property
    def out(self) -> Path:
        """The folder of results, with leaderboard.html; `ppbench baseline accept` takes it."""
        return self.swept.out

    def fault(self) -> str:
        """Return why this sweep is inconclusive, a control that failed or did not run; "" if all controls hold."""
        failed = [check.sentence for check in self.swept.checks if check.ok is not True]
        return f"harness fault, no fault of {self.request.defense!r}: {' '.join(failed)}" if failed else ""

    def failures(self) -> list[str]:
        """Return a sentence for failed cells, and for each limit that the defense breaks."""
        failed = [r for r in self.records if r.status == "failed"]
        sentences = [f"{len(failed)} cells failed, the first with: {failed[0].reason}"] if failed else []
        return sentences + [judged.sentence for judged in self.judged if not judged.kept]

    def doubts(self) -> list[str]:
        """Return a sentence for each limit that is kept, but by less than its interval."""
        return [judged.sentence for judged in self.judged if judged.kept and not judged.sure]

    def compare(self, baseline: Path | str | None = None) -> Comparison:
        """Return the comparison with `baseline` of this defense and the controls, for the requested cells.

        By default the baseline of the option or the ini file; without any the test is skipped. UsageError: no baseline.
        """
        __tracebackhide__ = True  # a skip is reported at the test's own line
        from ppbench.report.compare.outcome import compare
        from ppbench.report.controls import CONTROLS
        from ppbench.run.sweep import FILTERS

        folder = baseline or self.baseline
        if folder is None:
            import pytest

            pytest.skip(
                "no baseline to compare with; give --ppbench-baseline DIR or set ppbench_baseline in the ini file"
            )
        comparison = compare(Path(folder), self.out)
        defenses = {self.request.defense, *CONTROLS}
        filters = {key: values for key, values in self.request.only if key != "control"}
        rows = [
            row
            for row in comparison.rows
            if row.where.defense in defenses
            and (row.status != "missing" or all(FILTERS[k](row.record.config) in v for k, v in filters.items()))
        ]
        return replace(comparison, rows=tuple(rows))


def run_sweep(request: Request, home: Path, workers: int | None = None) -> Results:
    """Return the judged sweep of `request`, from the cache if the code is unchanged; UsageError: an unusable request.

    `home` caches results, one folder per suite and state of the code; older ones are deleted. workers: 1: this process.
    """
    from ppbench.records.sources import source_digest
    from ppbench.run.suite import load_suite
    from ppbench.run.sweep import sweep

    suite = load_suite(request.suite, request.preset, add=(request.defense,))
    file = Path(request.suite)
    out = home / f"{suite.id}-{source_digest((file,) if file.is_file() else ())}"
    _forget(home, f"{suite.id}-", out)
    engine = "inline" if workers == 1 else "local"
    swept = sweep(suite, out=out, engine=engine, workers=workers, only=request.filters)
    own_records = tuple(r for r in swept.records if r.config.defense.id == request.defense)
    figures = worst_figures(own_records, request.at)
    controls = [r.config.defense.control for r in own_records]
    if request.at not in (None, *(control.value for control in controls if control is not None)):
        raise UsageError(
            f"pytest.mark.ppbench: at={request.at:g} is no control value of {request.defense!r} in the sweep."
        )
    judged = tuple(judge_limit(name, limit, figures.get(name)) for name, limit in request.limits.items())
    return Results(request, swept, own_records, figures, judged)


def _forget(home: Path, prefix: str, current: Path) -> None:
    """Delete results of the same suite by other code; only folders that ppbench made, by its marker file."""
    for old in home.glob(f"{prefix}*") if home.is_dir() else ():
        digest = old.name.removeprefix(prefix)
        if old != current and len(digest) == 12 and "-" not in digest and (old / "ppbench.json").is_file():
            shutil.rmtree(old)
