"""Sweeps for tests: what a marker asks for, the sweep that answers it, kept until code changes; and the verdict."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ppbench.base.errors import UsageError, unknown
from ppbench.base.registry import canonical

if TYPE_CHECKING:
    from ppbench.records.schema import Record
    from ppbench.report.compare.outcome import Comparison
    from ppbench.run.sweep import SweepResult
    from ppbench.testing.worst import FigureName, Judged, Worst


@dataclass(frozen=True)
class Request:
    """What `@pytest.mark.ppbench(...)` says.

    only: filters of cells beside the defense, as {"stage": ("init",)}; at: the control value that the limits on asr,
    psnr and labels are about, None: every one; max_asr: of every membership attack; max_labels: the share recovered;
    max_psnr: dB of the median victim, each by its best attack; min_cap: "recon/1" of these worst cases over the grid.
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
        every = {"asr": self.max_asr, "psnr": self.max_psnr, "labels": self.max_labels, "cap": self.min_cap}
        return {cast("FigureName", figure): limit for figure, limit in every.items() if limit is not None}

    @property
    def filters(self) -> dict[str, tuple[str, ...]]:
        """Filters for the sweep, the defense among them."""
        return {**dict(self.only), "defense": (self.defense,)}


def request_of(given: Mapping[str, Any]) -> Request:
    """Return the request that a marker's keywords make; UsageError where one is unknown, missing or of another form."""
    known = [field.name for field in fields(Request)]
    for name in given:
        if name not in known:
            raise unknown("argument of pytest.mark.ppbench", name, known)
    if not isinstance(given.get("defense"), str):
        raise UsageError("pytest.mark.ppbench names no defense; give one, as @pytest.mark.ppbench(defense='dp').")
    for name in ("at", "max_asr", "max_psnr", "max_labels", "min_cap"):
        value = given.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise UsageError(f"pytest.mark.ppbench: {name}={value!r} cannot be used; give a number.")
    only = given.get("only") or {}
    if not isinstance(only, Mapping) or "defense" in only:
        raise UsageError(
            f"pytest.mark.ppbench: only={only!r} cannot be used; give filters as {{'stage': ['init']}}, and the "
            "defense as defense=..."
        )
    words = {key: (v,) if isinstance(v, str) else tuple(v) for key, v in sorted(only.items())}
    told = tuple((k, tuple(f"{v:g}" if isinstance(v, float) else str(v) for v in some)) for k, some in words.items())
    named = {"defense": canonical(given["defense"]), "suite": str(given.get("suite", "digits-quick"))}
    return Request(**{**given, **named, "only": told})


@dataclass(frozen=True)
class Results:
    """What the fixture `ppbench` gives a marked test: its sweep, judged.

    records: the defense's own cells; worst: their worst figures by name; judged: the request's limits beside them.
    """

    request: Request
    swept: SweepResult
    records: tuple[Record, ...]
    worst: Mapping[str, Worst]
    judged: tuple[Judged, ...]
    baseline: Path | None = None

    @property
    def out(self) -> Path:
        """The folder of results: leaderboard.html, and what `ppbench baseline accept` takes."""
        return self.swept.out

    def fault(self) -> str:
        """Return why nothing may be concluded from this sweep, a control that failed or did not run; "" if all hold."""
        bad = [check.sentence for check in self.swept.checks if check.ok is not True]
        return f"harness fault, no fault of {self.request.defense!r}: {' '.join(bad)}" if bad else ""

    def failures(self) -> list[str]:
        """Return what the defense does wrong: cells that failed, and limits that are not kept, a sentence each."""
        failed = [r for r in self.records if r.status == "failed"]
        told = [f"{len(failed)} cells failed, the first with: {failed[0].reason}"] if failed else []
        return told + [judged.sentence for judged in self.judged if not judged.kept]

    def doubts(self) -> list[str]:
        """Return limits that are kept, but by less than chance may have done, a sentence each."""
        return [judged.sentence for judged in self.judged if judged.kept and not judged.sure]

    def compare(self, baseline: Path | str | None = None) -> Comparison:
        """Return what changed since `baseline` for this defense and the controls, of the cells that were asked for.

        By default that of the option or the ini file; without any the test is skipped. UsageError: it is no baseline.
        """
        __tracebackhide__ = True  # a skip is told at the test's own line
        from ppbench.report.compare.outcome import compare
        from ppbench.report.controls import CONTROLS
        from ppbench.run.sweep import FILTERS

        folder = baseline or self.baseline
        if folder is None:
            import pytest

            pytest.skip(
                "no baseline to compare with; give --ppbench-baseline DIR or set ppbench_baseline in the ini file"
            )
        found = compare(Path(folder), self.out)
        mine = {self.request.defense, *CONTROLS}
        filters = {key: values for key, values in self.request.only if key != "control"}
        rows = [
            row
            for row in found.rows
            if row.where.defense in mine
            and (row.status != "missing" or all(FILTERS[k](row.record.config) in v for k, v in filters.items()))
        ]
        return replace(found, rows=tuple(rows))


def run(request: Request, home: Path, workers: int | None = None) -> Results:
    """Sweep what `request` asks for, or find it swept by the same code, and judge it; UsageError: it cannot be used.

    `home` keeps results, a folder a suite and state of the code; older ones are deleted. workers: 1 is this process.
    """
    from ppbench.records.sources import source_digest
    from ppbench.run.suite import load_suite
    from ppbench.run.sweep import sweep
    from ppbench.testing.worst import judge, worst_figures

    suite = load_suite(request.suite, request.preset, add=(request.defense,))
    file = Path(request.suite)
    out = home / f"{suite.id}-{source_digest((file,) if file.is_file() else ())}"
    _forget(home, f"{suite.id}-", out)
    engine = "inline" if workers == 1 else "local"
    swept = sweep(suite, out=out, engine=engine, workers=workers, only=request.filters)
    own = tuple(r for r in swept.records if r.config.defense.id == request.defense)
    figures = worst_figures(own, request.at)
    controls = [r.config.defense.control for r in own]
    if request.at not in (None, *(control.value for control in controls if control is not None)):
        raise UsageError(
            f"pytest.mark.ppbench: at={request.at:g} is no control value of {request.defense!r} in the sweep."
        )
    judged = tuple(judge(name, limit, figures.get(name)) for name, limit in request.limits.items())
    return Results(request, swept, own, figures, judged)


def _forget(home: Path, prefix: str, kept: Path) -> None:
    """Delete results of the same suite that other code gave; only what ppbench made, by its marker file."""
    for old in home.glob(f"{prefix}*") if home.is_dir() else ():
        digest = old.name.removeprefix(prefix)
        if old != kept and len(digest) == 12 and "-" not in digest and (old / "ppbench.json").is_file():
            shutil.rmtree(old)
