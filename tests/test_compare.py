"""`ppbench compare` must find what was planted, say nothing of what is as it was, and never trust a changed control."""

import dataclasses
import html
import json
from xml.etree import ElementTree

import pytest
import typer
from markdown_it import MarkdownIt

from ppbench.attacks.reconstruction.dlg import DLG
from ppbench.base.errors import UsageError
from ppbench.commands.results import compare as command
from ppbench.defenses.dp import DP
from ppbench.metrics.intervals import clopper_pearson
from ppbench.records.figure import aggregate
from ppbench.records.sources import SOURCES_FILE
from ppbench.records.store import Store
from ppbench.report.cap import caps
from ppbench.report.compare import outcome, report
from ppbench.report.compare import report as machine
from ppbench.report.compare.join import join
from ppbench.report.compare.judge import rows_of
from ppbench.report.compare.outcome import compare
from ppbench.report.compare.paired import ALL_RULES, change
from ppbench.run import evaluation
from ppbench.run.evaluation import evaluate

REAL = {
    **{"defense": "dp", "grid": (0.01,), "model": "mlp", "clients": 3, "train": 60, "rounds": 1, "victims": 12},
    **{"attack_batch": (1,), "attacks": ("dlg", "analytic"), "stages": ("init",), "tuning": 0},
    "settings": {"dlg.budget": 40, "dlg.restarts": 0, "analytic.budget": 100},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a maker of results, without boards: a comparison reads records alone. changed: code, while it runs."""

    def make(changed=None, **options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(evaluation, "write_board", lambda store, claims: [])
            if changed is not None:
                patch.setattr(*changed)
            return evaluate(**REAL, **options, out=tmp_path_factory.mktemp("run") / "out", workers=1).out

    return make


@pytest.fixture(scope="module")
def baseline(run):
    return run()


@pytest.fixture(scope="module")
def half_noise(run):
    """The same defense at the same parameters, whose code adds half the noise."""
    whole = DP.local_gradient

    def halved(self, *values):
        return whole(dataclasses.replace(self, sigma=self.sigma / 2), *values)

    return run((DP, "local_gradient", halved))


def test_half_the_noise_is_a_regression_and_in_the_worst_case_too(baseline, half_noise):
    comparison = compare(baseline, half_noise)
    assert comparison.exit_code == 1 and "REGRESSION" in comparison.verdict and "dp" in comparison.verdict
    worse = {row.where.attack: row for row in comparison.regressions if row.metric == "psnr_median"}
    assert {"analytic", "worst case of 2 attacks"} <= set(worse)
    gained = worse["analytic"].change
    assert gained is not None and 4 < gained.low <= gained.worse <= gained.high < 9, "half the noise is 6 dB"
    assert all(row.status == "ok" for row in comparison.rows if row.where.defense in ("none", "full_noise"))
    back = compare(half_noise, baseline)
    assert {row.metric for row in back.regressions} <= {"accuracy"}, "twice the noise may well cost some"
    assert any(row.metric == "psnr_median" for row in back.of("improved"))


def test_an_identical_rerun_has_nothing_to_report(baseline, run):
    comparison = compare(baseline, run())
    assert comparison.exit_code == 0 and not comparison.faults and {row.status for row in comparison.rows} == {"ok"}
    assert {row.where.defense for row in comparison.rows} == {"none", "full_noise", "dp"}


def test_an_attack_that_got_weaker_is_a_harness_fault_and_no_verdict_on_the_defense(baseline, run):
    """The same attack at the same version and parameters, whose code stops after one step."""
    whole = DLG.run
    weak = run((DLG, "run", lambda self, *values: whole(dataclasses.replace(self, budget=1), *values)))
    comparison = compare(baseline, weak)
    assert comparison.exit_code == 3 and any("weaker" in fault and "dlg" in fault for fault in comparison.faults)
    assert not comparison.regressions and not [r for r in comparison.of("improved", "ok") if r.where.defense == "dp"]
    assert "nothing is concluded" in comparison.verdict
    assert any("stronger" in note for note in compare(weak, baseline).notes)


def configured(record, part=None, **changes):
    """Return a record with another configuration: fields of `part`, or of the whole, changed."""
    config = record.config
    inner = changes if part is None else {part: getattr(config, part).model_copy(update=changes)}
    new = config.model_copy(update=inner)
    return record.model_copy(update={"config": new, "cell_id": new.cell_id()})


@pytest.fixture
def controls(cell):
    return [cell("none", None, 30.0), cell("full_noise", None, 5.0)]


def written(folder, *records):
    for record in records:
        Store(folder).save(record)
    return folder


@pytest.fixture
def versus(controls, tmp_path):
    """Return what compares records, each side beside sound controls unless told otherwise."""
    runs = iter(range(9))

    def make(base, new, controlled=True):
        folder, beside = tmp_path / str(next(runs)), controls if controlled else []
        return compare(written(folder / "base", *beside, *base), written(folder / "new", *beside, *new))

    return make


def test_a_dropped_mask_is_found(cell, versus):
    """A server that reads sums alone, and the same protocol when its masks are gone."""
    base, new = (cell("pbpfl_ext", 10.0, share, error=error) for share, error in ((7.0, 0.9), (35.0, 0.02)))
    comparison = versus([base], [new])
    assert comparison.exit_code == 1 and {row.metric for row in comparison.regressions} == {
        "psnr_median",
        "share_above_20db",
    }


def drawn_anew(record):
    """Return a record with the metrics that its scores give under its seed."""
    made = aggregate(record.victims, classes=record.config.model.classes, seed=record.config.seed)
    return record.model_copy(update={"metrics": made})


CHANGED = {
    "attack.version": lambda r: configured(r, "attack", version="2"),
    "attack.parameters.budget": lambda r: configured(r, "attack", parameters={"budget": 9}),
    "threat_model.id": lambda r: configured(r, "threat_model", id="server/2"),
    "suite_digest": lambda r: configured(r, suite_digest="ffff"),
    "suite ": lambda r: configured(r, suite="evaluate/2"),
    "data.sha256": lambda r: configured(r, "data", sha256="1" * 64),
    "model.id": lambda r: configured(r, "model", id="lenet"),
    "federation.tf32": lambda r: configured(r, "federation", device="cuda:0", tf32=True),
    "federation.rounds": lambda r: configured(r, "federation", rounds=30),
    "asked": lambda r: r.model_copy(update={"asked": "other"}),
    "asked is absent in NEW": lambda r: r.model_copy(update={"asked": None}),
    "victims": lambda r: configured(r, victims=99),
    "seed": lambda r: drawn_anew(configured(r, seed=5)),
}


@pytest.mark.parametrize("key", CHANGED)
def test_what_differs_makes_a_row_incomparable_and_is_named(cell, versus, key):
    comparison = versus([cell()], [CHANGED[key](cell())])
    row = next(row for row in comparison.rows if row.where.defense == "dp")
    assert comparison.exit_code == 3 and row.status == "incomparable" and key in row.note, row.note


def test_another_device_is_a_note_and_tf32_that_is_absent_is_false(cell, controls, tmp_path):
    sides = [*controls, cell()], [configured(r, "federation", device="cuda:0", tf32=False) for r in (*controls, cell())]
    for base, new, words in ((*sides, "on cpu, NEW on cuda:0"), (*reversed(sides), "on cuda:0, NEW on cpu")):
        comparison = compare(written(tmp_path / words / "base", *base), written(tmp_path / words / "new", *new))
        assert comparison.exit_code == 0 and not comparison.of("incomparable", "missing", "new")
        assert any(words in note for note in comparison.notes)
    both = join(sides[0], [*sides[0], *sides[1]])  # an equal device goes first, and no row is lost
    assert all(a is b for pair in both.pairs for a, b in zip(pair.base, pair.new, strict=True))
    assert [row.status for row in both.left] == ["new"] * 3


def test_the_version_of_a_defense_may_differ_but_not_within_a_folder(cell, versus):
    later = configured(cell(), "defense", version="2")
    comparison = versus([cell()], [later])
    rows = [row for row in comparison.rows if row.where.defense == "dp"]
    assert comparison.exit_code == 0 and rows and all("version 1 -> 2" in row.note for row in rows)
    with pytest.raises(UsageError, match=r"NEW holds 'dp' in versions '(1|2)' and '(1|2)'"):
        join([cell()], [cell(), later])


def test_what_is_left_over_meets_the_cell_that_differs_least_and_no_oracle(cell):
    base, oracle = cell(), configured(cell(), "attack", oracle=True)
    assert join([oracle], []) == join([], [oracle]) == join([], [])
    near = configured(base, "attack", version="2")
    far = configured(configured(configured(base, "attack", version="3"), "model", id="x"), victims=7)
    left = {row.status: row for row in join([base], [far, near]).left}
    assert set(left) == {"incomparable", "new"} and 'version is "1", NEW has "2"' in left["incomparable"].reason


def test_cells_that_failed_are_missing_and_those_that_had_failed_are_not_judged(cell, versus):
    good, bad = cell(), cell(status="failed")
    comparison = versus([good], [bad])
    assert comparison.exit_code == 4 and "failed in NEW: it broke" in comparison.of("missing")[0].note
    back = versus([bad], [good])
    assert back.exit_code == 3 and back.of("unjudged")[0].note == "failed in BASELINE"
    assert "UNDECIDABLE: dp: none of its 1 rows was judged" in back.verdict and "1 unjudged" in back.verdict


def test_a_baseline_in_which_nothing_can_be_judged_is_never_green(cell, controls, versus):
    alone = versus([], [])
    assert alone.exit_code == 3 and "Nothing was judged" in alone.verdict
    comparison = versus(
        [cell("none", None, status="failed"), controls[1], cell()], [*controls, cell()], controlled=False
    )
    assert comparison.exit_code == 3 and "none: none of its 1 rows was judged" in comparison.verdict
    half = versus([cell(), cell(value=0.2, status="failed")], [cell()])
    assert half.exit_code == 0 and "1 unjudged" in half.verdict, "the other point was judged; the verdict counts this"


def test_seeds_are_pooled_and_those_missing_or_failed_are_named(cell, rescored):
    base = [cell(seed=seed) for seed in (0, 1, 2)]
    joined = join(base, base)
    assert len(joined.pairs) == 1 and joined.pairs[0].seeds == (0, 1, 2)
    assert "seed 2 is not in NEW" in join(base, base[:2]).left[0].reason
    extra = join(base[:2], base)
    assert extra.pairs[0].seeds == (0, 1) and extra.left[0].status == "new"
    shifted = [rescored(r, victims=[v.model_copy(update={"psnr": v.psnr + 3}) for v in r.victims]) for r in base]
    result = change(base, shifted, ALL_RULES[0], "key")
    assert result.worse == pytest.approx(3) and result.n == 72 and "3 seeds" in result.method
    attacks = [cell(seed=seed, attack=attack) for seed in (0, 1) for attack in ("dlg", "ig")]
    lost = [*attacks, cell(seed=2, status="failed")]
    assert next(p for p in join(lost, attacks).pairs if p.where.attack == "dlg").seeds == (0, 1)
    rows = rows_of(join(lost, [*attacks, cell(seed=2)]))
    noted = {row.where.attack for row in rows if "seed 2 failed in BASELINE: not judged" in row.note}
    assert noted == {"dlg", "worst case of 2 attacks"}


def test_a_missing_cell_is_named_and_a_new_one_listed_which_is_no_regression_however_strong_the_attack(cell, versus):
    base = [cell(), cell(attack="ig", share=11.0)]
    more = [*base, cell(attack="gifd", share=40.0)]
    comparison = versus(base, more)
    assert comparison.exit_code == 0 and [row.where.attack for row in comparison.of("new")] == ["gifd"]
    assert any(row.where.attack == "worst case of 2 attacks" for row in comparison.rows)
    lost = versus(more, base)
    assert lost.exit_code == 4 and [row.where.attack for row in lost.of("missing")] == ["gifd"]
    assert "MISSING" in lost.verdict and "not in NEW" in report.row_summary(lost.of("missing")[0])


def test_noise_that_can_be_read_is_a_harness_fault(cell, controls, versus):
    loud = [controls[0], cell("full_noise", None, 40.0), cell()]
    comparison = versus([*controls, cell()], loud, controlled=False)
    assert comparison.exit_code == 3 and any("full_noise" in fault for fault in comparison.faults)
    alone = versus([cell()], [cell()], controlled=False)
    assert alone.exit_code == 3 and alone.faults, "without controls nothing is vouched for"


def trained(record, accuracy, n=10_000):
    ends = clopper_pearson(round(accuracy * n), n)
    utility = dict(accuracy=accuracy, low=ends.low, high=ends.high, n=n, curve=[(20, accuracy)])
    record = configured(record, "data", test=n)
    return record.model_copy(update={"utility": record.utility.model_copy(update=utility)})


def test_accuracy_that_falls_is_a_regression_of_the_defense_and_a_fault_of_the_undefended_model(cell, controls, versus):
    base = [trained(r, 0.95) for r in (*controls, cell())]
    comparison = versus(base, [*base[:2], trained(base[2], 0.90)], controlled=False)
    assert comparison.exit_code == 1 and [row.metric for row in comparison.regressions] == ["accuracy"]
    fault = versus(base, [trained(base[0], 0.90), *base[1:]], controlled=False)
    assert fault.exit_code == 3 and "Training of the undefended model got worse" in fault.faults[0]


def test_accuracy_where_hardly_anything_was_learned_is_luck_of_one_training(cell, controls, versus):
    for undefended, before, after, code in ((0.1, 0.2, 0.1, 0), (0.6, 0.15, 0.1, 0), (0.6, 0.6, 0.45, 1)):
        base = [*(trained(r, undefended, n=360) for r in controls), trained(cell(), before, n=360)]
        comparison = versus(base, [*base[:2], trained(base[2], after, n=360)], controlled=False)
        (row,) = [r for r in comparison.rows if r.metric == "accuracy" and r.change.worse]
        assert comparison.exit_code == code, (before, row)
        assert row.status == ("regression" if code else "inconclusive"), "nor is it called equal"


def test_a_figure_that_older_records_lack_is_no_difference(cell, controls, versus):
    def also(record, **figures):
        return record.model_copy(update={"utility": record.utility.model_copy(update=figures)})

    base = [trained(r, 0.95) for r in (*controls, cell())]
    for older, newer, equal in (({}, {"constant": 0.2}, True), ({"constant": 0.1}, {"constant": 0.2}, False)):
        sides = [[also(record, **figures) for record in base] for figures in (older, newer)]
        for one, two in (sides, sides[::-1]):
            rows = [row for row in versus(one, two, controlled=False).rows if row.metric == "accuracy"]
            assert rows and {row.change.certain for row in rows} == {equal}
    assert not base[2].utility.agrees(also(base[2], collapsed=1).utility), "0 is not the lack of a figure"


def test_the_claimed_epsilon_is_compared_as_stated(cell, versus):
    def at(epsilon):
        return cell("dp_sgd", 1.0, 9.0, epsilon=epsilon)

    for epsilon, code in ((2.2, 0), (2.3, 1), (1.0, 0), (None, 1)):
        comparison = versus([at(2.0)], [at(epsilon)])
        assert comparison.exit_code == code, epsilon
        assert [row.metric for row in comparison.regressions] == ["epsilon_claimed"] * code
    assert "no guarantee in NEW" in comparison.regressions[0].note


def test_cap_is_that_of_the_board_and_falls_with_the_distance(cell, controls, versus):
    base, new = ([cell(value=v, error=e) for v, e in ((0.1, 0.5), (0.2, last))] for last in (0.8, 0.4))
    row = next(row for row in versus(base, new).rows if row.metric == "cap")
    assert row.where.value is None and row.change is not None and row.status == "regression"
    for level, records in ((row.change.base, base), (row.change.new, new)):
        values = [cap.value for cap in caps([*controls, *records]).values() if cap.value is not None]
        assert values and values == pytest.approx([level] * len(values))
    assert not [r for r in rows_of(join(base, new[:-1])) if r.metric == "cap"], "half a grid has no CAP"


EVIL = "<img src=x onerror=alert(1)>|@all `x`\n::error::\x1b[31m\x00"


def test_names_of_others_do_nothing_in_any_output(cell, versus, capsys, monkeypatch):
    monkeypatch.setattr(outcome, "sound_records", Store.readable)  # which refuses such names: a second wall
    base, new = (configured(cell(share=share), "defense", id=EVIL) for share in (10.0, 30.0))
    evil = versus([base, configured(cell(), "defense", id=EVIL + "2")], [new])
    page = report.markdown(evil)
    assert "<img" not in page and "@all" not in page and "\\|" in page and "\x1b" not in page
    table = [line for line in page.splitlines() if line.startswith("|")]
    assert all(line.replace("\\|", "").count("|") == 6 for line in table)
    root = ElementTree.fromstring(machine.junit(evil))
    assert root.findall(".//failure") and "<img src=x" in root.findall(".//testcase")[0].get("classname", "")
    lines = machine.workflow_commands(evil)
    assert lines and all(line.startswith(("::error ", "::notice ")) and "\n" not in line for line in lines)
    assert all(line.count("::") == 2 or "%3A%3A" in line or "::error::" in line[8:] for line in lines)
    assert any("records/" in line and ".json" in line for line in lines)
    for width in (80, 160):
        monkeypatch.setattr(report, "REPORT_WIDTH", width)
        report.print_report(evil)
        assert "\x1b[31m" not in capsys.readouterr().out
    assert json.loads(machine.comparison_json(evil))["exit_code"] == 1


def test_a_narrow_screen_gets_one_line_per_row_with_the_verdict_first(cell, versus, capsys, monkeypatch):
    monkeypatch.setattr(report, "REPORT_WIDTH", 80)
    comparison = versus([cell(share=10.0)], [cell(share=30.0)])
    report.print_report(comparison)
    lines = capsys.readouterr().out.splitlines()
    shown = [row for row in comparison.rows if row.status != "ok"]
    assert len(shown) > 1
    for row, line in zip(shown, lines, strict=False):
        assert line.startswith(f"{row.status}  {row.point}, {row.title}: ") and report.row_summary(row) in line
    assert lines[-1].startswith("REGRESSION")


LINKS = ("@octocat", "https://evil.example/x", "www.evil.example", "a@b.example", "#12", "&#64;x", "a_b *c* `x`")


@pytest.mark.parametrize("text", [*LINKS, "GH-1 <b>"])
def test_markdown_shows_names_as_they_are_and_links_nothing(text):
    """Rendered, the comments that break links and mentions are gone, and what is left is the text itself."""
    page = MarkdownIt("commonmark", {"html": True}).render(report.markdown_text(text))
    assert page.startswith("<p>") and html.unescape(page.strip()[3:-4].replace("<!-- -->", "")) == text
    for linked in ("@o", "@b", "://", "www.", "#12", "GH-1"):
        assert linked not in page, "GitHub would make a link or a mention of it"


@pytest.mark.parametrize(("content", "message"), [('["a1", "b2"]', 1), ('["a1"]', 0), ("{", 0), ("7", 0)])
def test_cells_of_several_states_of_the_code_are_told(cell, controls, tmp_path, content, message):
    base, new = (written(tmp_path / name, *controls, cell()) for name in ("base", "new"))
    (new / SOURCES_FILE).write_text(content)
    comparison = compare(base, new)
    assert comparison.exit_code == 0 and len(comparison.warnings) == message
    lines = [line for line in machine.workflow_commands(comparison) if line.startswith("::warning ")]
    assert len(lines) == message and all("several states of the code" in line for line in lines)
    assert ("several states of the code" in report.markdown(comparison)) == bool(message)


def test_the_command_writes_what_is_asked_for(baseline, half_noise, tmp_path, capsys, monkeypatch):
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    page, xml = tmp_path / "page.md", tmp_path / "junit.xml"
    with pytest.raises(typer.Exit) as stop:
        command(baseline, half_noise, markdown=page, junit=xml, github=True)
    out = capsys.readouterr().out
    assert stop.value.exit_code == 1 and "REGRESSION" in out and "::error file=" in out
    assert summary.read_text() == "before\n" + page.read_text() and "### regression" in page.read_text()
    suite = next(s for s in ElementTree.parse(xml).getroot() if s.get("name") == "dp")
    assert int(suite.get("failures", 0)) == len(compare(baseline, half_noise).regressions)
    with pytest.raises(typer.Exit):
        command(baseline, half_noise, json_=True)
    document = json.loads(capsys.readouterr().out)
    assert document["exit_code"] == 1 and {row["status"] for row in document["rows"]} >= {"ok", "regression"}
    command(baseline, baseline)
    assert "No regression was found" in capsys.readouterr().out
    with pytest.raises(UsageError, match="give one of them"):
        command(baseline, baseline, github=True, json_=True)
    with pytest.raises(UsageError, match="no folder"):
        command(baseline, baseline, junit=tmp_path / "nowhere" / "x.xml")


def test_folders_that_cannot_be_compared_are_refused(cell, tmp_path):
    good, empty = written(tmp_path / "good", cell()), tmp_path / "empty"
    with pytest.raises(UsageError, match=r"BASELINE: .* is no folder"):
        compare(tmp_path / "nowhere", good)
    Store(empty).prepare()
    with pytest.raises(UsageError, match=r"NEW: .* holds no records"):
        compare(good, empty)
    path = next((good / "records").glob("*.json"))
    path.write_text(path.read_text()[:100])
    with pytest.raises(UsageError, match=r"not a whole record.*ppbench verify"):
        compare(good, good)


def test_too_few_victims_are_never_green_where_they_look_worse(cell, gained, versus):
    base = cell(n=4)
    comparison = versus([base], [gained(base, 9.0)])
    row = next(row for row in comparison.rows if row.blind)
    assert (
        comparison.exit_code == 3 and not comparison.faults and row.status == "inconclusive" and row.needed is not None
    )
    assert "4 victims are too few" in comparison.verdict and f"it takes {row.needed}" in comparison.verdict
    assert "too few victims for 2 rows" in report.row_summary(row) and "undecidable" in report.markdown(comparison)
    for n, code in ((row.needed - 1, 3), (row.needed, 1)):
        base = cell(n=n)
        assert versus([base], [gained(base, 9.0)]).exit_code == code, "as many as it says are enough, one less not"
    better = versus([gained(cell(n=4), 9.0)], [cell(n=4)])
    assert better.exit_code == 0 and any(row.blind for row in better.rows), "it does not look worse"
