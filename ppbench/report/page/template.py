"""The page's template: its functions, formats of figures, scripts and style sheets.

Third-party builds are in `vendor/` with their digests. The page's content security policy allows scripts only by their
digests.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from ppbench.metrics.guarantee import epsilon_words
from ppbench.records.schema import Metric, Utility
from ppbench.report.claims.page import claimed_text
from ppbench.report.leak import LEVEL_WORDS
from ppbench.report.learning import USABLE
from ppbench.report.page.sections import section_metric
from ppbench.report.worst import attack_of, cell_of

PAGE_TEMPLATES = Path(__file__).parent / "templates"
VENDOR = Path(__file__).parent / "vendor"
SCRIPT, STYLE = VENDOR / "tabulator.min.js", VENDOR / "tabulator_simple.min.css"
OWN_SCRIPTS = (PAGE_TEMPLATES / "tables.js", PAGE_TEMPLATES / "page.js")
_MAP = re.compile(r"^//# sourceMappingURL=.*$|/\*# sourceMappingURL=.*?\*/", re.MULTILINE)


@dataclass(frozen=True)
class Assets:
    """Scripts and style of a page. scripts: in the order in which they run; digests: of each, as in the policy."""

    scripts: tuple[Markup, ...]
    digests: tuple[str, ...]
    style: Markup


def script_digest(script: str) -> str:
    """Return the source expression of a content security policy that allows `script`, e.g. "sha256-...="."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


@lru_cache(maxsize=1)
def assets() -> Assets:
    """Return scripts and style of a page, without source maps; ValueError where a script would end its own element."""
    script, style = (_MAP.sub("", path.read_text(encoding="utf-8")).strip() for path in (SCRIPT, STYLE))
    scripts = (script, "\n".join(path.read_text(encoding="utf-8") for path in OWN_SCRIPTS))
    if any(re.search(r"</script|<!--", one, re.IGNORECASE) for one in scripts):
        raise ValueError("a script holds '</script' or '<!--' and cannot stand inside a page")
    own = (PAGE_TEMPLATES / "page.css").read_text(encoding="utf-8")
    return Assets(tuple(map(Markup, scripts)), tuple(map(script_digest, scripts)), Markup(f"{style}\n{own}"))


@lru_cache(maxsize=1)
def template() -> Template:
    """Return the page's template with its functions and assets, compiled once per process."""
    environment = Environment(
        loader=FileSystemLoader(PAGE_TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {
        form.__name__: form for form in (number, percent, byte_size, span, error, seconds, capitalized, epsilon_words)
    }
    environment.globals |= {
        "assets": assets(),
        "attack_of": attack_of,
        "cell_of": cell_of,
        "metric_of": section_metric,
        "claimed_text": claimed_text,
        "words": LEVEL_WORDS,
        "usable_points": USABLE,
    }
    return environment.get_template("page.html.j2")


# -- figures as the page shows them ----------------------------------------------------------------------------------
def number(value: float | None, digits: int = 2) -> str:
    """Return a figure with `digits` decimals, "n/a" for null, scientific from a million on."""
    if value is None:
        return "n/a"
    return f"{value:.2e}" if abs(value) >= 1e6 else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """Return a share as a percentage with one decimal, "n/a" for null."""
    return "n/a" if value is None else f"{100 * value:.1f} %"


def error(value: float | None) -> str:
    """Return a relative error as a percentage, from 10 on as a factor: "1.2 %", "98 times"; "n/a" for null."""
    if value is None:
        return "n/a"
    return f"{100 * value:.1f} %" if value < 10 else f"{value:.3g} times"


def span(estimate: Metric | Utility, factor: float = 1.0) -> str:
    """Return the interval of a figure, times `factor`, with one decimal: "17.2–19.7"; "" without one."""
    if estimate.low is None or estimate.high is None:
        return ""
    return f"{factor * estimate.low:.1f}–{factor * estimate.high:.1f}"  # noqa: RUF001 - a range takes an en dash


def capitalized(text: str) -> str:
    """Return a sentence with a capital first letter."""
    return text[:1].upper() + text[1:]


def byte_size(value: float | None) -> str:
    """Return bytes in B, kB, MB or GB (powers of 1000)."""
    if value is None:
        return "n/a"
    units = (
        f"{value / factor:.1f} {unit}" for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if value >= factor
    )
    return next(units, f"{value:.0f} B")


def seconds(value: float) -> str:
    """Return a time in s, ms or µs with three digits."""
    unit, factor = next((pair for pair in (("s", 1.0), ("ms", 1e-3)) if value >= pair[1]), ("µs", 1e-6))
    return f"{value / factor:.3g} {unit}"
