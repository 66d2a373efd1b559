"""The table of claims as Markdown: a function of claims, records and benchmark figures alone, byte for byte."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ppbench.base.errors import UsageError, count_of
from ppbench.claims.check import NO_RECORD, Checked, Unchecked, check_claims
from ppbench.claims.claim import METRIC_NAMES, Claim, claimed_by_all, figure_of
from ppbench.claims.cost_rules import Benchmark, read_figures, time_is_kept
from ppbench.claims.rules import RIVALS, RULES
from ppbench.records.schema import Record
from ppbench.records.store import open_results

NOTHING = "-"
NAME_DIGITS = 8  # hex digits of a cell's name, as on the page and in `records/`
_HEADS = (
    *("Defense", "Source", "Setting of the paper", "Claimed", "Our setting", "By the paper's own measure"),
    *("Plain attack", "Worst case", "Could have been", "Verdict", "Records"),
)
FEW_CLAIMS = 3  # claims of one table up to which each is written out, where they cannot be checked


def write_claims(folders: Sequence[Path], figures: Sequence[Path]) -> str:
    """Return the page on all installed defenses from folders of records and files of figures; or UsageError."""
    records: list[Record] = []
    for folder in folders:
        loaded = open_results(folder).load_all()
        if not loaded:
            raise UsageError(f"{folder} holds no records; run ppbench evaluate --out {folder} first.")
        records += loaded
    benchmarks = read_figures(figures)
    return page(check_claims(claimed_by_all(), records, benchmarks), records, benchmarks)


def page(outcomes: Sequence[Checked | Unchecked], records: Sequence[Record], benchmarks: Sequence[Benchmark]) -> str:
    """Return the Markdown: the table of what can be checked, the list of what cannot, and the rules."""
    checked = [c for c in outcomes if isinstance(c, Checked)]
    unchecked = [c for c in outcomes if isinstance(c, Unchecked)]
    inside = [c for c in checked if c.finding.verdict != "outside the premise"]
    alone, compared = ([c for c in inside if (c.claim.than is None) == single] for single in (True, False))
    parts = [
        "# What papers claim, and what the records say",
        _about(records, benchmarks, outcomes),
        _numbers(outcomes),
        "## Claims about one defense",
        _table(alone),
        "## Claims to be better than another defense",
        _table(compared),
        "## Claims whose premise our records do not meet",
        "What was run is not what these claims are about, so nothing follows; the figures are reported all the same.",
        _table([c for c in checked if c not in inside]),
        "## Claims that could not be checked",
        _list(unchecked) if unchecked else "None.",
        "## Rules",
        RULE_OF_RULES,
        _rules(),
    ]
    return "\n\n".join(parts) + "\n"


RULE_OF_RULES = """A verdict that no result could change is none. Each rule judges the same cells again as if everything
had leaked (with the same adversary's figures on the undefended model) and as if nothing had (with the figures on
noise); of models, as if they had learned nothing, and as if nothing were lost. "Could have been" has both
ends. A claim that would fall even if nothing leaked, or hold even if everything did, is inconclusive here. "By the
paper's own measure" is the figure by the paper's attack and distance, for comparison; the verdict is
of the worst case."""


def _about(records: Sequence[Record], benchmarks: Sequence[Benchmark], outcomes: Sequence[Checked | Unchecked]) -> str:
    versions = sorted({record.environment.ppbench for record in records})
    seeds = sorted({record.config.seed for record in records})
    source = f"{len({r.cell_id for r in records})} records of ppbench {', '.join(versions)}"
    source += f", seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    if benchmarks:
        where = sorted({f"{b.machine}, {b.date}" for b in benchmarks})
        source += f", and {len(benchmarks)} benchmarks ({'; '.join(where)})"
    number = Counter(_fate(c) for c in outcomes)
    judged = sum(number[fate] for fate in _JUDGED)
    return (
        "Written by `ppbench claims`; every figure, verdict and reason is computed, none is typed. "
        f"From {escape(source)}.\n\n"
        f"Of {len(outcomes)} claims {number['holds']} hold, {number['falls']} fall, {number['identity']} are "
        f"identities, {number[_BOUNDED] + number['inconclusive']} are inconclusive ({number[_BOUNDED]} of them "
        f"with both ends of what could have come out), of {number['outside the premise']} our records are outside the "
        f"premise, and {number[_UNCHECKED]} could not be checked. So {judged} are judged inside their premise, or with "
        "both ends printed. A protection that falls in any setting that meets its premise has fallen; one that holds "
        "does so as far as the attacks named were tried."
    )


_BOUNDED, _UNCHECKED = "inconclusive, both ends printed", "not checked"
_JUDGED = ("holds", "falls", "identity", _BOUNDED)
_FATES = (*_JUDGED, "inconclusive", "outside the premise", _UNCHECKED)


def _fate(outcome: Checked | Unchecked) -> str:
    """Return the column of the table of numbers in which an outcome is counted."""
    if isinstance(outcome, Unchecked):
        return _UNCHECKED
    verdict = outcome.finding.verdict
    return _BOUNDED if verdict == "inconclusive" and both_ends(outcome) else verdict


def _numbers(outcomes: Sequence[Checked | Unchecked]) -> str:
    """Return the table of the numbers of claims by outcome, one row per defense."""
    heads = ["Defense", "Claims", *_FATES]
    lines = [heads, ["---"] * len(heads)]
    for name in [*dict.fromkeys(c.defense for c in outcomes), ""]:
        some = [c for c in outcomes if name in (c.defense, "")]
        number = Counter(_fate(c) for c in some)
        lines.append([escape(name) or "all", str(len(some)), *(str(number[fate]) for fate in _FATES)])
    return _rows(lines)


def both_ends(checked: Checked) -> bool:
    """Return whether both ends of what could have come out are known."""
    return all(end not in ("", "not known") for end in (checked.finding.least, checked.finding.most))


def _table(checked: Sequence[Checked]) -> str:
    if not checked:
        return "None."
    return _rows([_HEADS, ["---"] * len(_HEADS), *(_row(c) for c in checked)])


def _rows(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _row(c: Checked) -> list[str]:
    finding = c.finding
    verdict = f"**{escape(' '.join(word for word in (finding.verdict, finding.to) if word))}**"
    other = f"other {', '.join(c.differs)} than the paper's" if c.differs else ""
    worst = f"the {c.gathered} of {c.evaluations} evaluations" if c.evaluations > 1 else ""
    reason = "; ".join(escape(word) for word in (finding.reason, other, worst) if word)
    names = " ".join(f"`{cell[:NAME_DIGITS]}`" for cell in finding.cells)
    head = (c.defense, c.claim.source, c.claim.setting or "not given", c.claim.text, c.setting)
    ends = f"{finding.least} to {finding.most}" if finding.least else ""
    figures = [escape(figure) or NOTHING for figure in (finding.own, finding.plain, finding.worst, ends)]
    return [*map(escape, head), *figures, f"{verdict}: {reason}" if reason else verdict, names or NOTHING]


def _list(unchecked: Sequence[Unchecked]) -> str:
    """Return the list of claims that cannot be checked, by defense, source and reason."""
    groups: dict[tuple[str, str, str], list[Unchecked]] = {}
    for item in unchecked:
        source = "" if item.unrun else item.claim.source
        reason = NO_RECORD if item.reason.startswith(NO_RECORD) else item.reason
        groups.setdefault((item.defense, source, reason), []).append(item)
    lines = []
    for (defense, source, reason), some in groups.items():
        where = escape(f"{defense}, {source}" if source else defense)
        what = _several([item.claim for item in some]) if source else count_of(len(some), "claim")
        if reason == NO_RECORD:
            reason += "; ".join(dict.fromkeys(item.reason.removeprefix(NO_RECORD) for item in some))
        verdict = "Not comparable" if source and reason.startswith(NO_RECORD) else "Not checked"
        lines.append(f"- {where}: {escape(what)}. {verdict}: {escape(reason)}.")
    return "\n".join(lines)


def _several(claims: Sequence[Claim]) -> str:
    """Return up to `FEW_CLAIMS` claims in words, or their number and the range of each metric."""
    words = list(dict.fromkeys(claim.text for claim in claims))
    if len(words) <= FEW_CLAIMS:
        return "; ".join(words)
    ranges = []
    for metric in dict.fromkeys(claim.metric for claim in claims):
        values = [claim.value for claim in claims if claim.metric == metric and claim.value is not None]
        ends = dict.fromkeys(figure_of(metric, end) for end in (min(values), max(values))) if values else ()
        ranges.append(" ".join(word for word in (METRIC_NAMES.get(metric, metric), " to ".join(ends)) if word))
    return f"{count_of(len(claims), 'claim')} ({'; '.join(ranges)})"


def _rules() -> str:
    """Return the list of rules in words: the first paragraph of each one's docstring."""
    rules = dict.fromkeys([*(rule.judge for rule in (*RULES.values(), *RIVALS.values())), time_is_kept])
    texts = [" ".join((rule.__doc__ or "").split("\n\n")[0].split()) for rule in rules]
    return "\n".join(f"- {escape(text)}" for text in texts if not text.startswith("Return"))


def escape(text: str) -> str:
    """Return `text` as one line of Markdown with all markup escaped, also within a table."""
    flat = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    flat = re.sub(r"([\\`*\[\]|~])", r"\\\1", flat)
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", flat)
