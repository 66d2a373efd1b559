"""The frame: one key of what may be compared with what, one worst case, and what follows for boards and sentences."""

import json

import pytest
from pydantic import BaseModel

from ppbench.claims.check import Checked, check_claims
from ppbench.claims.claim import Claim
from ppbench.records.schema import CellConfig, Record
from ppbench.report.compare.join import NO_FACTS, equal_facts, where_of
from ppbench.report.costs import cost_rows
from ppbench.report.findings import fate_of, joint_fate
from ppbench.report.frame import EVALUATION, NAMES, NOT_DISTINGUISHING, ROW, SERIES, SETTING, frame_of, key_of
from ppbench.report.knowing import Knowledge
from ppbench.report.leak import SEVERITY, leak_of, leaks_of
from ppbench.report.page.boards import boards_of, defense_sentences, judged_evaluations, no_claims, worst_rows
from ppbench.report.page.overview import overviews
from ppbench.report.rows import upload_rows
from ppbench.report.verdict import sentences, verdicts
from ppbench.report.worst import WorstCase
from ppbench.testing.sweeps import worst_figures


def probes(fabricate, controls=True):
    """Return `dp` under two probes, which the same attack rebuilds to 9 and to 31 dB; controls that hold under both."""
    levels = [("dp", 0.1, 9.0, 31.0), ("none", None, 35.0, 35.0), ("full_noise", None, 6.0, 6.0)]
    return [
        fabricate(name, value, "dlg", "reconstruction", db, control="sigma", probe=probe)
        for name, value, *by in (levels if controls else levels[:1])
        for probe, db in zip(("gradient", "local"), by, strict=True)
    ]


def glances(records):
    ranked = boards_of(records, no_claims)
    return overviews(ranked, judged_evaluations(records), cost_rows(ranked, records, lambda _: None))


OTHER = {"stage": "audit", "probe": "local", "attack.kind": "label", "federation.tf32": True}


def another(value, path):
    """Return another value for the field of a configuration at a dotted path."""
    if path in OTHER:
        return OTHER[path]
    if isinstance(value, dict):
        return {**value, "another": 1}
    if isinstance(value, list):
        return [*value, 7]
    return not value if isinstance(value, bool) else value + type(value)(1)  # of a text: "1" behind it


def altered(model, prefix=""):
    """Yield the dotted name of every field of a configuration, and the configuration with another value there."""
    for name in type(model).model_fields:
        value, path = getattr(model, name), f"{prefix}{name}"
        whole = not isinstance(value, BaseModel)
        for where, other in [(path, another(value, path))] if whole else altered(value, f"{path}."):
            yield where, model.model_copy(update={name: other})


def test_every_field_of_a_configuration_is_in_the_key_or_listed_with_a_reason(fabricate):
    config = fabricate("dp", 0.1, "dlg", "reconstruction", control="sigma", parameters={"clip": 1.0}).config
    full = CellConfig.model_validate(
        config.model_dump(by_alias=True)
        | {"audit": {"references": 2, "canaries": 80, "canary_clients": 5}}
        | {"victims_from": 3}
        | {"attack": config.attack.model_dump() | {"follows": "ig", "parameters": {"budget": 100}}}
    )
    silent = [path for path, other in altered(full) if key_of(other) == key_of(full)]
    assert sorted(silent) == sorted(NOT_DISTINGUISHING), "decide: is it in the key, or does it distinguish nothing?"
    about = where_of(full), equal_facts(full)  # compare takes every field as its row, as a fact, or says why not
    same = {path for path, other in altered(full) if (where_of(other), equal_facts(other)) == about}
    reasons = {path for path, reason in NO_FACTS.items() if reason != "part of `Where`"}
    assert same == reasons | {"defense.version", "defense.code"}, "versions are what is compared"
    assert set(NO_FACTS) <= {path for path, _ in altered(full)} | {"defense"}


def test_projections_are_of_the_key_and_the_coarser_ones_blank_the_rest(fabricate):
    one = fabricate("dp", 0.1, "dlg", "reconstruction", control="sigma")
    two = fabricate("dp", 0.2, "dlg", "reconstruction", control="sigma")
    keys = [key_of(record.config) for record in (one, two)]
    assert keys[0].only(SERIES) == keys[1].only(SERIES) != keys[0] and keys[0].only(ROW) != keys[1].only(ROW)
    blank = keys[0].only(EVALUATION)
    assert (blank.defense, blank.value, blank.attack, blank.threat) == ("", None, "", "") and blank.seed == 0
    assert set(EVALUATION) < set(SETTING) < set(ROW) < set(NAMES)


def test_a_frame_makes_each_worst_case_once_and_stands_for_its_records(fabricate):
    records = [fabricate("dp", 0.1, a, "reconstruction", db, control="sigma") for a, db in (("dlg", 9), ("ig", 8))]
    frame = frame_of(records)
    assert frame_of(frame) is frame and list(frame) == records and list(frame[:1]) == records[:1]
    (row,) = frame.by(ROW).values()
    assert row.worst("psnr_median") is frame.of(records[::-1]).worst("psnr_median")


def test_two_probes_give_two_boards_and_two_sentences_each_naming_its_probe(fabricate):
    both = probes(fabricate)
    rows = {t.about.rpartition(", ")[2]: [r for r in t.rows if r.value.entry.defense.id == "dp"] for t in glances(both)}
    assert {probe: [row.verdict for row in some] for probe, some in rows.items()} == {
        "probe gradient": ["no better than blind, untested"],
        "probe local": ["rebuilt by dlg"],
    }
    for records in (both, both[::-1]):
        results = {b.setting.probing.probe: b for b in boards_of(records, no_claims)}
        worst = {
            probe: next(e for e in b.entries if e.defense.id == "dp").worst.metric("psnr_median").value
            for probe, b in results.items()
        }
        assert worst == {"gradient": 10.0, "local": 32.0}
        values = [one.sentence for one in defense_sentences(judged_evaluations(records)) if " images" in one.sentence]
        assert len(values) == 2
        assert values[0].startswith(
            "[probe gradient] dp at sigma=0.1: the attacks tried here see no more of images than"
        )
        assert values[1].startswith("[probe local] dp at sigma=0.1: images are rebuilt, even by an unaware attacker")
        assert "10.0 dB" in values[0] and "32.0 dB" in values[1]


def test_one_probe_is_named_where_it_is_not_the_plain_one(fabricate):
    plain, local = probes(fabricate, controls=False)
    assert sentences("dp", [plain])[0].startswith("dp at") and sentences("dp", [local])[0].startswith("[probe local] ")
    rounds = fabricate("dp", 0.1, "dlg", "reconstruction", 9.0, control="sigma", probe_rounds=2)
    assert sentences("dp", [rounds])[0].startswith("[probe gradient, 2 rounds] ")


def test_a_control_that_falls_under_one_probe_vouches_for_no_other(fabricate):
    some = [r for r in probes(fabricate) if (r.config.defense.id, r.config.probe) != ("none", "local")]
    stands = fabricate("none", None, "dlg", "reconstruction", 9.0, probe="local")
    (one,) = judged_evaluations([*some, stands])
    assert not one.reliable
    assert "[server/1, probe local] The best attack (dlg) does NOT break" in one.checks[0].sentence
    reliable = {b.setting.probing.probe: b.reliable for b in boards_of([*some, stands], no_claims)}
    assert reliable == {"gradient": True, "local": False}


def test_evaluations_that_differ_in_what_their_words_leave_out_say_so(fabricate):
    one = fabricate("dp", 0.1, "dlg", "reconstruction", 9.0, control="sigma")
    federation = one.config.federation.model_dump() | {"lr": 0.2}
    two = fabricate("dp", 0.1, "dlg", "reconstruction", 9.0, control="sigma", federation=federation)
    assert [e.about.rpartition(", ")[2] for e in judged_evaluations([one, two])] == ["lr=0.1", "lr=0.2"]


def audited(fabricate, canaries, auc, references=4):
    audit = dict(references=references, canaries=canaries)
    about = dict(control="sigma", stage="audit", threat="server/1", audit=audit)
    record = fabricate("dp", 0.1, "mia_loss", "membership", auc, **about)
    metric = record.metric("auc").model_copy(update={"name": "canary_auc"})
    return record.model_copy(update={"metrics": [*record.metrics, metric]}) if canaries else record


def test_audits_with_and_without_canaries_share_no_row_and_no_order_decides_their_headline(fabricate):
    seen = []
    both = [audited(fabricate, 0, 0.6), audited(fabricate, 80, 0.7)]
    for records in (both, both[::-1]):
        ranked = boards_of(records, no_claims)
        seen.append([(b.setting.audit.canaries, b.headline, len(b.entries), len(b.entries[0].records)) for b in ranked])
        values = [s for s in sentences("dp", records) if "audit" in s]
        assert [s.partition("]")[0] for s in values] == [
            "[server/1, 0 canaries, 4 references",
            "[server/1, 80 canaries, 4 references",
        ]
    assert seen[0] == seen[1] == [(0, "auc", 1, 1), (80, "canary_auc", 1, 1)]
    more = [audited(fabricate, 80, 0.6, references) for references in (0, 16)]
    assert [b.setting.audit.references for b in boards_of(more, no_claims)] == [0, 16]


def split(fabricate):
    """Return two attacks, each of which rebuilds another half of the victims to 30 dB, beside an undefended model."""
    records = [fabricate(n, None, "dlg", "reconstruction", db) for n, db in (("none", 35.0), ("full_noise", 6.0))]
    for attack, rest, knows in (("dlg", 0, False), ("adaptive_spn", 1, True)):
        scores = [
            s.model_copy(update={"psnr": 30.0 if n % 2 == rest else 9.0}) for n, s in enumerate(records[0].victims)
        ]
        more = dict(control="alpha2", adaptive=knows, scores=scores)
        records.append(fabricate("spn", 0.1, attack, "reconstruction", **more))
    return records


def test_boards_table_sentences_claims_and_limits_judge_by_one_worst_case(fabricate):
    records = split(fabricate)
    (board,) = boards_of(records, no_claims)
    entry = next(e for e in board.entries if e.defense.id == "spn")
    (row,) = [row for row in worst_rows([board]) if row["defense"] == "spn"]
    (line,) = [
        line for line in upload_rows(records, leaks_of(records, Knowledge.of(records))) if line.key.defense == "spn"
    ]
    claim = Claim("psnr_median", 8.0, "digits", "mlp", None, "Table 1")
    (outcome,) = check_claims({"spn": (claim,)}, records, ())
    limit = worst_figures([r for r in records if r.config.defense.id == "spn"])["psnr"]
    assert entry.worst.metric("psnr_median").value == row["worst_psnr_median"] == limit.value == 30.0
    leak = line.leak
    assert leak.worst.metric("psnr_median").value == 30.0 and leak.unaware.worst.metric("psnr_median").value == 19.5
    assert isinstance(outcome, Checked) and (outcome.finding.verdict, outcome.finding.to) == ("falls", "to 30.0 dB")
    assert len(outcome.finding.cells) == 3, "both attacks' cells and the undefended one"
    worst = entry.worst
    assert isinstance(worst, WorstCase) and not isinstance(worst, Record) and not hasattr(worst, "cell_id")
    assert worst.leading in records and worst.leading.config.cell_id() == worst.leading.cell_id
    assert worst.attacks == ("adaptive_spn", "dlg") and worst.knows and worst.name == "portfolio (adaptive_spn)"
    assert {r.config.attack.id for r in worst.winners} == {"dlg", "adaptive_spn"}


def test_names_of_attacks_are_never_parsed(fabricate):
    evil = fabricate("dp", 0.1, "portfolio (x)", "reconstruction", 35.0, control="sigma")
    controls = [r for r in split(fabricate) if r.config.defense.id != "spn"]
    (glance,) = glances([*controls, evil])
    assert [row.verdict for row in glance.rows if row.value.entry.defense.id == "dp"] == ["rebuilt by portfolio (x)"]


@pytest.mark.parametrize("level", [9.0, 35.0])
def test_a_control_value_at_which_every_attack_failed_leaves_a_defense_undecided(fabricate, level):
    controls = [r for r in split(fabricate) if r.config.defense.id != "spn"]
    known = fabricate("dp", 0.1, "dlg", "reconstruction", level, control="sigma", adaptive=True)
    failed = fabricate("dp", 0.5, "dlg", "reconstruction", control="sigma", status="failed")
    assert leak_of([failed], vouched=True).level == "undecided"
    assert [fate_of(level) for level in SEVERITY] == ["stands", "undecided", "falls", "falls"]
    assert joint_fate(["stands", "falls", "undecided"]) == "falls" and joint_fate(["stands", "stands"]) == "stands"
    assert joint_fate(["stands", "undecided"]) == "undecided"
    records = [*controls, known, failed]
    (values,) = [one for one in verdicts("dp", records) if "sigma=0.5" in one.sentence]
    assert "whether images leak is undecided, because no attack gave a figure" in values.sentence
    assert (values.fate, values.leak.level) == ("undecided", "undecided")
    (glance,) = glances(records)
    assert [row.verdict for row in glance.rows if row.value.entry.defense.id == "dp"] == [
        "no better than blind" if level < 20 else "undecided, attacks failed"
    ], "a value that stands vouches for itself; that all values fall is not known"


def test_a_verdict_says_of_which_setting_what_became_of_it_by_which_cell(fabricate):
    records = probes(fabricate)
    results = {
        one.verdict.settings[0].probing.probe: one.verdict
        for one in defense_sentences(judged_evaluations(records))
        if one.verdict.settings
    }
    assert {probe: v.fate for probe, v in results.items()} == {"gradient": "stands", "local": "falls"}
    assert [v.question for v in verdicts("dp", records)] == ["pixels", "pixels", "guarantee"]
    local = results["local"].as_dict()
    assert local["sentence"].startswith("[probe local] dp") and local["attack"] == "dlg"
    assert (local["level"], local["level_plain"], local["qualifiers"]) == ("rebuilt", "rebuilt", [])
    quiet = results["gradient"].as_dict()
    assert (quiet["level"], quiet["level_plain"]) == ("blind", "blind")
    untested = {"code": "untested", "words": "no attack here is shown to know the defense"}
    assert quiet["qualifiers"] == [untested] and json.loads(json.dumps(quiet)) == quiet
    assert local["figure"]["name"] == "psnr_median" and local["figure"]["value"] == 32.0
    assert local["cell_id"] in {r.cell_id for r in records if r.config.probe == "local"}
    assert local["settings"][0]["value"] == 0.1 and json.loads(json.dumps(local)) == local
