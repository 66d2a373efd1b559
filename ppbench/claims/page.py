"""Papers' claims as Markdown, one page per paper: a function of claims, records and benchmark figures, byte by byte."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import get_args

from ppbench.base.errors import UsageError, count_of, listed
from ppbench.base.registry import load_all
from ppbench.claims.check import Checked, ClaimFate, Fact, Unchecked, check_claims, claim_fate, facts_of
from ppbench.claims.claim import METRIC_NAMES, RATIO_WORDS, About, Claim, Paper, equations, figure_of, papers_of
from ppbench.claims.cost_rules import ratio_text, read_figures, time_is_kept
from ppbench.claims.rules import RIVALS, RULES
from ppbench.records.schema import Record
from ppbench.records.store import open_results
from ppbench.report.page.board import row_anchor

Outcome = Checked | Unchecked
NAME_DIGITS = 8
"""Hex digits of a cell's name, as on a board's page and in `records/`."""
NOTHING = "-"
MOST_CENTRAL, FEW = 4, 3
"""Central facts that the short answer names, and cells up to which a reason names each."""
JUDGED_FATES: tuple[ClaimFate, ...] = ("falls", "holds", "inconclusive")
"""Fates for which a table is shown open; tables without any are folded."""
TALLIED: dict[ClaimFate, str] = {
    "falls": "fall",
    "holds": "hold",
    "inconclusive": "inconclusive",
    "identity": "identity",
    "outside the premise": "records outside the premise",
    "not comparable": "a stopwatch's",
    "not run": "not run",
    "apart": "listed apart",
}
"""Fates of facts, as heads of the tally."""
CELL_WORDS: dict[ClaimFate, str] = {"outside the premise": "outside", "comparison": "", "repetition": "repeats"}
"""Fates as a cell has them, where they are shorter there."""
HEADS = METRIC_NAMES | {
    "accuracy": "accuracy",
    "cap_reconstruction": "reconstruction",
    "cap_label": "membership (labels)",
    "cap_tracing": "tracing",
    "feat_mse_mean": "Feat-MSE",
    "memory_ratio": "memory",
    "epoch_cost_ratio": "time of an epoch",
}
"""Metrics as heads of columns."""
CLOCKLESS = "Without a clock: "
"""Begins what stands beside a stopwatch's figures."""
ANSWERS: dict[ClaimFate, str] = {
    "falls": "falls",
    "holds": "holds",
    "inconclusive": "is inconclusive",
    "identity": "is an identity",
}
"""What became of a central fact, as the short answer says it."""


@dataclass(frozen=True)
class Source:
    """Where records come from: the name of a board or folder, its page and how it was made, "" if unknown."""

    name: str
    records: tuple[Record, ...]
    link: str = ""
    command: str = ""


def sources_of(folders: Iterable[Path]) -> list[Source]:
    """Return the records of folders and archives with their names (UsageError: one holds none)."""
    sources = []
    for folder in folders:
        records = open_results(folder).load_all()
        if not records:
            raise UsageError(f"{folder} holds no records; run ppbench evaluate --out {folder} first.")
        sources.append(Source(folder.parent.name if folder.name == "records.zip" else folder.name, tuple(records)))
    return sources


def write_claims(folders: Sequence[Path], figures: Sequence[Path]) -> str:
    """Return the pages on all papers about a defense in some records or figures, as one text; or UsageError."""
    sources = sources_of(folders)
    pages = paper_pages(sources, figures)
    seen = {record.config.defense.id for source in sources for record in source.records}
    texts = [page.markdown(2) for page in pages if seen & {name for name, _ in page.paper.tables}]
    return "\n".join([f"# What papers claim, and what the records say\n\n{about(sources)}\n", *texts, rules_page(2)])


def paper_pages(sources: Sequence[Source], figures: Sequence[Path]) -> list[PaperPage]:
    """Return a page for each paper with claims about an installed defense, judged by the records of all sources."""
    records = {record.cell_id: record for source in sources for record in source.records}
    papers = list(dict.fromkeys(paper for name in sorted(load_all("defenses")) for paper in papers_of(name)))
    claimed: dict[str, list[Claim]] = {}
    for paper in papers:
        for name, claim in paper.tables:
            claimed.setdefault(name, []).append(claim)
    outcomes = check_claims(claimed, list(records.values()), read_figures(figures))
    by_claim = {(outcome.defense, outcome.claim): outcome for outcome in outcomes}
    ordered = sorted(sources, key=lambda source: source.name)
    return [PaperPage(paper, tuple(by_claim[pair] for pair in paper.tables), tuple(ordered)) for paper in papers]


def about(sources: Sequence[Source]) -> str:
    """Return from what the verdicts were computed: "From 12 records of ppbench 0.1.0, seeds 0, 1."."""
    records = {record.cell_id: record for source in sources for record in source.records}.values()
    versions = sorted({record.environment.ppbench for record in records})
    seeds = sorted({record.config.seed for record in records})
    words = f"{len(records)} records of ppbench {', '.join(versions)}, seed{'s' if len(seeds) > 1 else ''}"
    return (
        f"From {escape(words)} {', '.join(map(str, seeds))}; every figure, verdict and reason is computed. A "
        "protection that falls in any setting that meets its premise has fallen; one that holds does so as far as "
        "attacks were tried."
    )


@dataclass(frozen=True)
class PaperPage:
    """A paper with what became of its claims, in the order of its file, and where the records come from."""

    paper: Paper
    outcomes: tuple[Outcome, ...]
    sources: tuple[Source, ...]

    @cached_property
    def facts(self) -> list[Fact]:
        """The facts that the paper claims."""
        return facts_of(self.outcomes)

    @property
    def name(self) -> str:
        """The short name of the paper's defense, or the paper's citation."""
        return self.paper.name or self.paper.citation

    def count(self, kind: About, fate: ClaimFate) -> int:
        """Return how many facts of a kind have a fate."""
        return sum(fact.fate == fate and fact.leading.claim.about == kind for fact in self.facts)

    def answer(self) -> str:
        """Return what became of the central claims, as "Theorem 9 falls to 77% of decisions read", if any is judged."""
        judged = [fact for fact in self.facts if fact.leading.claim.central and fact.fate in ANSWERS]
        judged.sort(key=lambda fact: list(ANSWERS).index(fact.fate))
        verdicts = list(dict.fromkeys(map(_verdict_of, judged)))
        return "; ".join(verdicts[:MOST_CENTRAL]) or "no record here judges its central claims"

    def markdown(self, level: int = 1) -> str:
        """Return the page in Markdown; level: of its title's heading."""
        mark = "#" * level
        parts = [self._head(mark), self._short(), self._tally()]
        parts += [self._table(name, mark) for name in sorted(self._table_names(), key=_natural)]
        parts += [self._statements(mark), self._apart(), self._settings(), self._evidence(mark)]
        return "\n\n".join(part for part in parts if part) + "\n"

    def _head(self, mark: str) -> str:
        paper = self.paper
        named = not paper.title or paper.title.startswith(self.name)
        title = f"{mark} {escape(paper.title or self.name) if named else escape(f'{self.name}: {paper.title}')}"
        if not paper.authors:
            return title
        place = escape(paper.citation.rpartition("(")[2].removesuffix(")"))
        names = listed([f"`{name}`" for name in paper.own])
        return f"{title}\n\n{escape(paper.authors)}. [{place}]({paper.link}). Here: {names}."

    def _short(self) -> str:
        says = f"It says: {self.paper.says}." if self.paper.says else ""
        answer = self.answer()
        sentences = [says, f"{answer[:1].upper()}{answer[1:]}.", *map(self._sentence, get_args(About))]
        return escape(" ".join(word for word in sentences if word))

    def _sentence(self, kind: About) -> str:
        number = {fate: self.count(kind, fate) for fate in TALLIED}
        judged, every = sum(number[fate] for fate in JUDGED_FATES), count_of(sum(number.values()), "fact")
        if not judged:
            return f"{kind.capitalize()}: none of {every} could be judged."
        counts = f"{number['falls']} fall, {number['holds']} hold, {number['inconclusive']} are inconclusive"
        return f"{kind.capitalize()}: {judged} of {every} could be judged; {counts}."

    def _tally(self) -> str:
        used = [fate for fate in TALLIED if any(fact.fate == fate for fact in self.facts)]
        rows = [["Facts about", "all", *(TALLIED[fate] for fate in used)]]
        for kind in get_args(About):
            numbers = [self.count(kind, fate) for fate in used]
            rows.append([kind, *map(str, (sum(numbers), *numbers))])
        repeated = sum(bool(o.claim.repeats) for o in self.outcomes if not o.claim.baseline)
        baselines = sum(outcome.claim.baseline for outcome in self.outcomes)
        words = f"A fact is a row of a table, counted once, in however many of {len(self.outcomes)} cells"
        words += f"; {repeated} repeat others" if repeated else ""
        words += (
            f"; {baselines} are other defenses' figures, which the paper prints for comparison" if baselines else ""
        )
        return f"{markdown_table(rows)}\n\n{words}."

    def _table_names(self) -> set[str]:
        return {outcome.claim.table for outcome in self.outcomes if in_table(outcome.claim)}

    def _table(self, name: str, mark: str) -> str:
        here = [o for o in self.outcomes if in_table(o.claim) and o.claim.table == name]
        across = next((fields for known, fields in self.paper.across if known == name), "")
        caveats = dict.fromkeys(escape(o.claim.caveat) for o in here if o.claim.caveat)
        text = "\n\n".join([markdown_table(grid(here, across)), *caveats, *clockless(here), self._reasons(here)])
        if any(claim_fate(outcome) in JUDGED_FATES for outcome in here):
            return f"{mark}# {escape(name)}\n\n{text}"
        number = Counter(TALLIED.get(claim_fate(o), claim_fate(o)) for o in here)
        why = ", ".join(f"{count} {words}" for words, count in number.most_common())
        return folded(f"{name}: {count_of(len(here), 'figure')} without a verdict ({why})", text)

    def _statements(self, mark: str) -> str:
        here = [o for o in self.outcomes if not in_table(o.claim) and claim_fate(o) not in ("apart", "repetition")]
        if not here:
            return ""
        rows = [["Where", "What it says", "Ours", "Verdict"]]
        for outcome in here:
            claim = outcome.claim
            where = f"{claim.source} ({outcome.defense})"
            ours = [*map(escape, (where, _claim_words(claim), our_figure(outcome)))]
            rows.append([*ours, verdict_of(outcome) + _because(outcome)])
        caveats = dict.fromkeys(escape(f"{o.claim.source}: {o.claim.caveat}") for o in here if o.claim.caveat)
        below = *caveats, *clockless(here), self._reasons(here)
        return "\n\n".join([f"{mark}# Outside the tables", markdown_table(rows), *below])

    def _reasons(self, outcomes: Sequence[Outcome]) -> str:
        groups: dict[str, list[Outcome]] = {}
        for outcome in outcomes:
            groups.setdefault(self._reason(outcome), []).append(outcome)
        varying = varying_fields(outcomes)
        lines = [f"- {labels(some, varying)}: {reason}." for reason, some in groups.items()]
        return folded("Reasons, ends, settings and records", "\n".join(lines))

    def _reason(self, outcome: Outcome) -> str:
        """Return the verdict with its reason, what else could have come out, and from which setting and records."""
        if isinstance(outcome, Unchecked):
            return escape(f"{TALLIED.get(outcome.status, outcome.status)}: {outcome.reason}")
        finding, setting = outcome.finding, f"setting {self._numbers[outcome.setting]}"
        if outcome.claim.repeats:
            return escape(f"repeats {outcome.claim.repeats}; {setting}")
        if outcome.lacks:
            return escape(f"outside the premise: {'; '.join(outcome.lacks)}; {setting}")
        if finding.verdict in ("comparison", "not comparable"):
            return escape(f"{'printed for comparison' if outcome.claim.baseline else finding.reason}; {setting}")
        several = f"the {outcome.gathered} of {outcome.evaluations} evaluations" if outcome.evaluations > 1 else ""
        other = f"other {', '.join(outcome.differs)} than the paper's" if outcome.differs else ""
        names = " ".join(f"`{cell[:NAME_DIGITS]}`" for cell in finding.cells)
        words = [
            f"{' '.join(word for word in (finding.verdict, finding.to) if word)}: {finding.reason}",
            f"could have been {finding.least} to {finding.most}" if both_ends(outcome) else "",
            f"by the paper's own attack and measure {finding.own}" if finding.own else "",
            f"without knowing the defense {finding.plain}" if finding.plain not in ("", finding.worst) else "",
            *(other, several, setting),
        ]
        return escape("; ".join(word for word in words if word)) + (f"; records {names}" if names else "")

    @cached_property
    def _homes(self) -> dict[str, str]:
        """The settings of the findings, each with the name of the source of its records, "" if unknown."""
        home = {record.cell_id: source.name for source in self.sources for record in source.records}
        homes: dict[str, str] = {}
        for outcome in self.outcomes:
            if isinstance(outcome, Checked):
                cells = [home[cell] for cell in outcome.finding.cells if cell in home]
                timed = ["benchmark"] if outcome.setting.startswith("benchmark") else []
                homes[outcome.setting] = homes.get(outcome.setting) or next(iter([*cells, *timed]), "")
        return homes

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {setting: number for number, setting in enumerate(self._homes, 1)}

    def _settings(self) -> str:
        lines = [
            f"{n}. {escape(f'{home}: {setting}' if home and not setting.startswith(home) else setting)}"
            for n, (setting, home) in enumerate(self._homes.items(), 1)
        ]
        return folded(count_of(len(lines), "setting"), "\n".join(lines)) if lines else ""

    def _apart(self) -> str:
        groups: dict[tuple[str, str], int] = Counter()
        for outcome in self.outcomes:
            repeated = claim_fate(outcome) == "repetition" and not in_table(outcome.claim)
            if isinstance(outcome, Unchecked) and (outcome.status == "apart" or repeated):
                groups[(outcome.claim.table, outcome.reason)] += 1
        lines = [
            f"- {escape(f'{where}, {count_of(number, _CLAIM)}: {why}')}." for (where, why), number in groups.items()
        ]
        what = f"{count_of(sum(groups.values()), _CLAIM)} that nobody can judge, or only who has the data"
        return folded(what, "\n".join(lines)) if lines else ""

    def _evidence(self, mark: str) -> str:
        lines = []
        for source in self.sources:
            if source.name in self._homes.values():
                name = f"[{escape(source.name)}]({source.link})" if source.link else escape(source.name)
                rows = self._rows_of(source)
                lines.append(f"- {name}{rows}{f', made by `{source.command}`' if source.command else ''}")
        return "\n\n".join([f"{mark}# Evidence", "\n".join(lines)]) if lines else ""

    def _rows_of(self, source: Source) -> str:
        """Return which rows of a board's page the findings are of: " (rows [spn](...#spn))", "" where it has none."""
        cells = {record.cell_id for record in source.records}
        judged = [outcome for outcome in self.outcomes if isinstance(outcome, Checked)]
        names = sorted({outcome.defense for outcome in judged if cells.intersection(outcome.finding.cells)})
        links = [f"[{escape(name)}]({source.link}#{row_anchor(name)})" for name in names]
        return f" (row{'s' if len(links) > 1 else ''} {listed(links)})" if source.link and links else ""


_CLAIM = "claim"


# -- one cell --
def in_table(claim: Claim) -> bool:
    """Return whether a claim is a figure in a numbered table of its paper."""
    return claim.value is not None and re.fullmatch(r"Table \d+", claim.table) is not None


def printed(claim: Claim) -> str:
    """Return a claim's figure as its paper has it, with its note."""
    if claim.value is None:
        return claim.note
    if claim.metric.startswith("cap_"):
        text = f"{claim.value:.2f}"
    else:
        ratio = claim.metric in RATIO_WORDS
        text = f"{ratio_text(claim.value)}x" if ratio else figure_of(claim.metric, claim.value)
    return f"{text} ({claim.note})" if claim.note else text


def our_figure(outcome: Outcome) -> str:
    """Return our figure beside a claim's, with its interval and attack, "" without any."""
    return outcome.finding.worst if isinstance(outcome, Checked) else ""


def verdict_of(outcome: Outcome) -> str:
    """Return what became of a claim, as a cell has it; verdicts in bold. What is no claim has none."""
    fate = claim_fate(outcome)
    if outcome.claim.baseline and fate != "outside the premise":
        return ""
    words = CELL_WORDS.get(fate, fate)
    return f"**{words}**" if fate in ("falls", "holds") else words


def cell_text(outcomes: Sequence[Outcome], undefended: bool) -> str:
    """Return a cell of a paper's table: the printed figure, ours and the verdict, and those beside other defenses.

    undefended: whether the paper's undefended figure is printed too.
    """
    lines, beside = [], dict[str, list[str]]()
    for outcome in outcomes:
        claim, ours = outcome.claim, our_figure(outcome)
        if claim.than is None:
            plain = f", undefended {_undefended(claim)}" if undefended and claim.undefended is not None else ""
            words = [escape(printed(claim) + plain), escape(f"ours {ours}") if ours else "", verdict_of(outcome)]
            lines += [word for word in words if word]
        else:
            rival = " ".join([claim.than.defense, *equations(claim.than.when)])
            beside.setdefault(verdict_of(outcome), []).append(rival)
    lines += [f"better than {escape(', '.join(rivals))}: {verdict}" for verdict, rivals in beside.items()]
    return "<br>".join(lines) or NOTHING


def _undefended(claim: Claim) -> str:
    return "" if claim.undefended is None else figure_of(claim.metric, claim.undefended)


# -- a paper's table --
PLACES = ("part", "dataset", "model", "options", "clients", "defense", "when", "metric", "batch")
"""What places a figure in a table, in the order of labels."""


def grid(outcomes: Sequence[Outcome], across: str = "") -> list[list[str]]:
    """Return a table of a paper: rows of Markdown, the first being its head.

    across: the fields whose values are columns, with commas; without any all but defense and parameters.
    """
    places = [(_place(outcome), outcome) for outcome in outcomes]
    varying = varying_fields(outcomes)
    chosen = [word.strip() for word in across.split(",") if word.strip()]
    columns = [name for name in varying if (name in chosen if chosen else name not in ("defense", "when", "options"))]
    rows = [name for name in varying if name not in columns] or ["defense"]
    cells: dict[tuple[tuple[str, ...], tuple[str, ...]], list[Outcome]] = {}
    for place, outcome in places:
        key = tuple(place[name] for name in rows), tuple(place[name] for name in columns)
        cells.setdefault(key, []).append(outcome)
    heads, sides = (list(dict.fromkeys(key[end] for key in cells)) for end in (1, 0))
    titles = [escape(", ".join(word for word in head if word)) or escape(places[0][0]["metric"]) for head in heads]
    plain = [{_undefended(o.claim) for key, some in cells.items() if key[1] == head for o in some} for head in heads]
    apart = any(len(figures) > 1 for figures in plain)  # they differ from row to row
    lines = (
        []
        if apart or not set().union(*plain) - {""}
        else [["undefended", *("".join(some) or NOTHING for some in plain)]]
    )
    for side in sides:
        row = [cell_text(cells.get((side, head), ()), apart) for head in heads]
        lines.append([escape(" ".join(word for word in side if word)), *row])
    return [["", *titles], *lines]


def varying_fields(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the fields in which outcomes differ, without those that follow from another one; a metric is always named
    but by the part of the table.
    """
    places = [_place(outcome) for outcome in outcomes]
    kept: list[str] = []
    for name in PLACES:
        others = [other for other in kept if name != "metric" or other == "part"]
        follows = any(len({(p[other], p[name]) for p in places}) == len({p[other] for p in places}) for other in others)
        if not follows and len({place[name] for place in places}) > 1:
            kept.append(name)
    return kept


def _place(outcome: Outcome) -> Mapping[str, str]:
    claim = outcome.claim
    return {
        "part": claim.part,
        "dataset": claim.dataset,
        "model": claim.model,
        "options": " ".join(equations(claim.options)),
        "clients": "" if claim.clients is None else count_of(claim.clients, "client"),
        "defense": outcome.defense,
        "when": " ".join(equations(claim.when)),
        "metric": HEADS.get(claim.metric, claim.metric),
        "batch": "" if claim.batch is None else f"batch {claim.batch}",
    }


def clockless(outcomes: Sequence[Outcome]) -> list[str]:
    """Return what needs no clock beside a stopwatch's figures: a paragraph, or none."""
    counts = dict.fromkeys(word for o in outcomes if isinstance(o, Checked) for word in o.counted)
    return [escape(f"{CLOCKLESS}{'; '.join(counts)}.")] if counts else []


def labels(outcomes: Sequence[Outcome], varying: Sequence[str]) -> str:
    """Return which cells a reason is about: their defense and what distinguishes them, or how many there are."""
    words = []
    for outcome in outcomes:
        claim, place = outcome.claim, _place(outcome)
        than = (
            "" if claim.than is None else f"better than {' '.join([claim.than.defense, *equations(claim.than.when)])}"
        )
        names = ["defense", *(name for name in varying if name != "defense")]
        words.append(" ".join(word for word in (*(place[name] for name in names), than) if word))
    if len(words) <= FEW:
        return escape("; ".join(words))
    return escape(f"{count_of(len(words), 'figure')} of {listed(list(dict.fromkeys(o.defense for o in outcomes)))}")


# -- text --
def _verdict_of(fact: Fact) -> str:
    """Return what became of a central fact in words."""
    outcome, (number, every) = fact.leading, fact.share
    claim = outcome.claim
    where = claim.source
    if claim.value is not None and claim.dataset:
        head = HEADS.get(claim.metric, claim.metric)
        where += f", better {head} than others on {claim.dataset}" if claim.than else f", {head} on {claim.dataset}"
    to = outcome.finding.to if isinstance(outcome, Checked) and every == 1 else f"in {number} of {every} cells"
    return f"{where}: {ANSWERS[fact.fate]} {to}".strip()


def _because(outcome: Outcome) -> str:
    """Return in Markdown to what a claim falls and why, to follow its verdict; "" of what has none."""
    if isinstance(outcome, Unchecked) or outcome.claim.baseline:
        return ""
    finding = outcome.finding
    return (f" {escape(finding.to)}" if finding.to else "") + (f": {escape(finding.reason)}" if finding.reason else "")


def _claim_words(claim: Claim) -> str:
    better = claim.than is not None and claim.value is None
    return f"{claim.text} (better than {claim.than.defense})" if better and claim.than else claim.text


def _natural(name: str) -> tuple[int, str]:
    return int(re.sub(r"\D", "", name) or 0), name


def both_ends(checked: Checked) -> bool:
    """Return whether both ends of what could have come out are known."""
    return all(end not in ("", "not known") for end in (checked.finding.least, checked.finding.most))


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of Markdown as a table; the first is its head."""
    head, *rest = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rest))


def folded(summary: str, text: str) -> str:
    """Return text that opens on demand."""
    return f'<details markdown="1"><summary>{escape(summary)}</summary>\n\n{text}\n\n</details>'


RULE_OF_RULES = """A rule judges the cells of a claim as recorded, as if everything had leaked (with the same
adversary's figures on the undefended model), and as if nothing had (with the figures on noise). For models the extremes
are one that learned nothing and one that lost nothing. The column "Could have been" has both ends. A claim that would
fall even if nothing leaked, or hold even if everything did, is inconclusive, because no result could change its
verdict. "By the paper's own attack and measure" is for comparison; the verdict is of the worst case. Figures that a
paper prints of other defenses are shown beside ours without a verdict, because it does not claim them."""


def rules_page(level: int = 1) -> str:
    """Return the rules in words: the first paragraph of each one's docstring."""
    known = dict.fromkeys([*(rule.judge for rule in (*RULES.values(), *RIVALS.values())), time_is_kept])
    texts = [" ".join((rule.__doc__ or "").split("\n\n")[0].split()) for rule in known]
    lines = "\n".join(f"- {escape(text)}" for text in texts if not text.startswith("Return"))
    return f"{'#' * level} How claims are judged\n\n{RULE_OF_RULES}\n\n{lines}\n"


def escape(text: str) -> str:
    """Return `text` as one line of Markdown with all markup escaped, also within a table."""
    flat = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    flat = re.sub(r"([\\`*\[\]|~])", r"\\\1", flat)
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\_", flat)
