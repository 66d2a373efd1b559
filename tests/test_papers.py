"""What papers print, kept as TOML: the figures themselves, and every way in which a file can be wrong."""

import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from ppbench.base.errors import UsageError
from ppbench.base.registry import Plugin, load_plugin
from ppbench.claims.claim import PAPERS, Claim, Rival, better, claims_of, papers_of, read_paper

TABLE = """
citation = "Doe et al., Rounded Uploads, 2026"

[[table]]
defense = "rounding"
source = "Table 2"
metric = "psnr_median"
dataset = "digits"
setting = "{dataset}, {where}"
columns = ["when", "value", "where"]
rows = [[{ step = 0.1, law = "grid" }, 9.0, "batch 1"], [{ step = 0.5 }, 6.5, "batch 8"]]

[[table]]
defense = "rounding"
source = "Table 3"
metric = "client_cost_ratio"
value = [3, 2]
"""


def printed(name: str):
    """Return one of the papers that come with ppbench."""
    return read_paper(PAPERS / f"{name}.toml")


def read(tmp_path: Path, text: str):
    (tmp_path / "doe2026.toml").write_text(text)
    return read_paper(tmp_path / "doe2026.toml")


def test_a_table_is_a_claim_a_row_and_keeps_what_is_printed(tmp_path):
    with pytest.raises(UsageError, match=r"none.toml cannot be read"):
        read_paper(tmp_path / "none.toml")
    result = read(tmp_path, TABLE)
    first = Claim(
        *("psnr_median", 9.0, "digits", "", None, "Table 2"),
        when=(("step", 0.1), ("law", "grid")),
        setting="digits, batch 1",
    )
    assert result.citation == "Doe et al., Rounded Uploads, 2026" and result.claims("nobody") == ()
    assert result.claims("rounding")[0] == first and result.claims("rounding")[1].value == 6.5
    assert result.claims("rounding")[2] == Claim("client_cost_ratio", 1.5, "", "", None, "Table 3")


def test_numbers_that_stand_beside_one_another_are_claims_to_be_better(tmp_path):
    rows = """
    [[table]]
    source = "Table 4"
    metric = "accuracy"
    dataset = "digits"
    columns = ["defense", "when", "clients", "value"]
    rows = [["rounding", {step = 1}, 5, 0.9], ["other", {law = "a"}, 5, 0.8], ["other", {law = "b"}, 5, 0.7],
            ["rounding", {step = 1}, 9, 0.6]]

    [[rival]]
    source = "Table 4"
    defense = "rounding"
    than = "other"
    than_when = { law = ["a"] }
    metrics = ["accuracy"]
    """
    (claim,) = [
        c for c in read(tmp_path, TABLE + rows.replace('law = ["a"]', 'law = "a"')).claims("rounding") if c.than
    ]
    assert (claim.value, claim.clients, claim.than) == (0.9, 5, Rival("other", 0.8, (("law", "a"),)))
    assert claim.premise == ("dataset", "model", "batch", "epochs")
    assert replace(claim, metric="cap_label").premise == ("dataset", "model", "batch")  # at equal accuracy
    assert "clients" in replace(claim, than=None).premise
    worse = rows.replace('law = ["a"]', 'law = "a"').replace("5, 0.9]", "5, 0.8]")
    assert not [c for c in read(tmp_path, TABLE + worse).claims("rounding") if c.than]  # as good is not better
    with pytest.raises(UsageError, match="rival: no table prints rounding beside other, source 'Table 4'"):
        read(tmp_path, TABLE + rows)
    with pytest.raises(UsageError, match="rival of source 'Table 4': metrics: Field required"):
        read(tmp_path, TABLE + rows.replace("metrics", "metric_"))


def test_what_is_better_depends_on_the_metric():
    small = ("psnr_median", "asr", "mse", "client_cost_ratio", "time_to_accuracy_ratio", "encryption_seconds")
    large = ("accuracy", "accuracy_top5", "cap_label", "bytes_saving", "test_mse_mean", "feat_mse_mean")
    assert all(better(metric, 0.1, 0.2) and not better(metric, 0.2, 0.1) for metric in small)
    assert all(better(metric, 0.2, 0.1) and not better(metric, 0.1, 0.2) for metric in large)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('dataset = "digits"', "dataset = digits", ("doe2026.toml", "cannot be read as the TOML")),
        ("citation =", "title =", ("must hold a citation and [[table]]s",)),
        ("[[table]]", "[table]", ("cannot be read",)),
        ('metric = "psnr_median"', "", ("source 'Table 2', row 1: metric: Field required",)),
        ('defense = "rounding"', "", ("row 1: there is no field 'defense'",)),
        ('6.5, "batch 8"', '"much", "batch 8"', ("'Table 2', row 2: value", "valid number")),
        ('6.5, "batch 8"', "6.5", ("row 2: 2 values for 3 columns",)),
        ("{where}", "{place}", ("row 1: there is no field 'place'",)),
        ("value = [3, 2]", "value = [3, 0]", ("'Table 3', row 1: value",)),
        ("value = [3, 2]", "worth = 1.5", ("'Table 3', row 1: worth: Unexpected keyword argument",)),
        ("value = [3, 2]", "value = 1.5\nbatch = 0.5", ("'Table 3', row 1: batch",)),
    ],
)
def test_a_file_that_is_wrong_is_one_sentence_that_names_the_place(old, new, words, tmp_path):
    assert old in TABLE
    with pytest.raises(UsageError) as raised:
        read(tmp_path, TABLE.replace(old, new))
    assert all(word in str(raised.value) for word in words), raised.value


PRINTED = {  # table: rows x columns of numbers that are not the undefended model's, counted in the papers by hand
    "fan2020": {"Table 7": 4 * 9, "Table 8": 4 * 9, "Table 9": 4 * 9, "Table 10": 4 * 9, "Table 11": 23 * 4},
    "feng2020": {"Table 1": 4 * 3, "Table 2": 3, "Table 3": 6},
    "yang2024": {  # Table 4 repeats the accuracies of Table 2; Table 5 has 18, 18, 22 and 15 numbers beside the totals
        "Table 1": 4 * 4 * 4, "Table 2": 5 * 8, "Table 3": 8 * 4, "Table 4": 4 * 2,
        "Table 5": 4 * (6 + 6 + 7 + 5) + 4 * 4,
    },
    "cao2022": {"Table 1": 2, "Table 2": 8 * 2, "Table 3": 8 * 2, "Table 4": 4 * 2},
    "feng2023": {"Table 1": 7 * 6, "Table 2": 3 * 4, "Table 3": 5 * 2, "Table 4": 3 * 2},
}  # fmt: skip


@pytest.mark.parametrize("name", PRINTED)
def test_every_number_of_the_tables_is_a_claim_once(name):
    alone = [(defense, claim) for defense, claim in printed(name).tables if claim.than is None]
    assert len(set(alone)) == len(alone)
    for table, count in PRINTED[name].items():
        kept = [c for _, c in alone if c.source == table or c.source.startswith(f"{table} (")]
        assert len(kept) == count, (table, len(kept))
        assert all(c.value is not None for c in kept)


def claimed(name: str, defense: str, **fields):
    """Return the values of the claims about a defense that have these fields, `when` in part."""
    when = tuple(fields.pop("when", {}).items())
    claims = [c for c in printed(name).claims(defense) if c.than is None and set(when) <= set(c.when)]
    return [c.value for c in claims if all(getattr(c, key) == value for key, value in fields.items())]


def test_what_the_papers_print_is_what_the_tables_of_claims_hold():
    """Sums of rows and single numbers, typed from the papers: a digit that is wrong, or in another row, is found."""
    caps = {"dp": {}, "spn": {}, "ppdl": {"theta": 0.05}}
    assert [round(sum(claimed("fan2020", d, source="Table 7", when=w)), 2) for d, w in caps.items()] == [
        15.19, 17.03, 16.79,
    ]  # fmt: skip
    assert claimed("fan2020", "ppdl", source="Table 9", when={"theta": 0.05}) == [
        0.18, 0.18, 0.18, 0.02, 0.13, 0.16, 0.16, 0.16, 0.16,
    ]  # fmt: skip
    assert sum(claimed("fan2020", "ppdl", source="Table 10", when={"theta": 0.3})) == pytest.approx(5.56)
    assert claimed("fan2020", "spn", source="Table 11", when={"alpha2": 0.1}) == [0.9927, 0.6897, 0.3457, 0.8880]
    assert claimed("fan2020", "ppdl", source="Table 11", when={"theta": 0.05, "sigma": 0.5}, dataset="svhn") == [0.5151]
    errors = [c for c in printed("feng2020").claims("pbpfl") if c.metric == "mse" and c.dataset == "bank-marketing"]
    assert sum(c.value for c in errors) == pytest.approx(0.727)
    assert sum(c.undefended for c in errors) == pytest.approx(0.730)
    ratios = {c.metric: round(c.value, 2) for c in printed("feng2020").claims("pbpfl") if "ratio" in c.metric}
    assert (ratios["upload_ratio"], ratios["client_backward_ratio"], ratios["client_cost_ratio"]) == (3.0, 2.54, 2.5)
    assert claimed("feng2020", "pbpfl", source="Table 2") == [0.6174, 0.6557, 0.5933]
    assert claimed("yang2024", "mpdp", metric="asr", source="Table 4") == [0.5030, 0.5023]
    assert claimed("yang2024", "mpdp", metric="psnr_median", source="Table 2") == [9.22, 8.49]
    assert claimed("yang2024", "mp_cdp", metric="psnr_median") == [12.15, 12.85]
    assert claimed("yang2024", "pile", source="Table 3", clients=100) == [0.5992, 170174.57 / 26.01, 12.13, 0.5511]
    assert claimed("yang2024", "hybridalpha", source="Table 1 (ACC)", clients=100, dataset="cifar10") == [
        pytest.approx(3.89 * 86400 / 71.31)
    ]
    assert claimed("yang2024", "tp_smc", source="Table 5 (Grad_Enc)") == [23.15, 28.29, 50.96, 54.73]
    assert claimed("cao2022", "fedpc", source="Table 4") == [0.8927, 0.8564, 0.8317, 0.8001]
    assert sum(claimed("cao2022", "phong", source="Table 2")) == pytest.approx(7.2903)
    assert claimed("feng2023", "baffle", source="Table 2", dataset="cifar10", when={"k": 500}) == [0.3814, 0.4169]
    assert claimed("feng2023", "baffle", source="Table 3 (Avg)", metric="accuracy_top5", when={"k": 20}) == [0.8024]


def test_bytes_of_fedpc_and_baffle_follow_from_their_equations():
    """FedPC's Eq. 8: V (N + 1) + (N - 1) V / 16 beside 2 V N; a worker's own share of it; K numbers of n."""
    for n in range(3, 11):
        sent = (n + 1) + (n - 1) / 16
        (saved,) = claimed("cao2022", "fedpc", metric="bytes_saving", clients=n)
        assert saved == pytest.approx(1 - sent / (2 * n), abs=2e-4)  # 42.20% is printed of 42.1875%
        assert claimed("cao2022", "fedpc", metric="upload_ratio", clients=n) == [pytest.approx((sent - n) / n)]
    for model, n, some in (("lenet_baffle", 2.7e4, (100, 200, 500, 1000)), ("wrn_10_2", 3.0e5, (200, 500, 1000))):
        for k in some:
            assert claimed("feng2023", "baffle", metric="upload_ratio", model=model, when={"k": k}) == [k / n]


def test_settings_are_those_that_the_papers_print():
    for defense, claim in printed("fan2020").tables:
        if claim.source.startswith("Table"):
            assert (claim.clients, claim.epochs, claim.batch_size, claim.lr) == (10, 300, 32, 0.001), (defense, claim)
            assert claim.model == "dlnet" and dict(claim.options) == (
                {"activation": "tanh"} if claim.dataset == "svhn" else {}
            )
    assert {c.epochs for c in printed("feng2020").claims("pbpfl") if c.metric in ("mse", "accuracy")} == {200}
    assert {c.epochs for _, c in printed("cao2022").tables if c.dataset == "lggs"} == {35}
    every = [c for name in PRINTED for _, c in printed(name).tables]
    assert all(c.setting for c in every) and len(every) > 800


def test_premises_of_privacy_are_with_the_claims():
    baffle = [c for c in printed("feng2023").claims("baffle") if c.metric == "psnr_median"]
    assert [dict(c.when)["masks"] for c in baffle] == [("ring64", "ring32")]  # less than gradients tell: not printed
    assert [dict(c.when)["scheme"] for c in baffle] == ["twice"]
    fedpc = [c for c in printed("cao2022").claims("fedpc") if c.metric == "psnr_median"]
    assert [(c.steps, c.premise) for c in fedpc] == [(8, ("steps",))] * 3 and fedpc[1].than == Rival("phong")
    mpdp = [c for c in printed("yang2024").claims("mpdp") if c.source == "Table 2" and c.metric == "psnr_median"]
    assert {(c.family, c.premise) for c in mpdp if c.than is None} == {("residual", ("dataset", "family"))}


def test_rivals_are_told_where_the_paper_prints_them_worse():
    """SPN beats DP's and PPDL's CAP in 94 of 108 comparisons (Tables 7 to 10), and every accuracy at equal size."""
    every = [c for c in printed("fan2020").claims("spn") if c.than is not None]
    rivals = [c for c in every if c.value is not None]
    assert {c.than for c in every if c.value is None} == {Rival("standalone")}  # a drawing: no number to read
    assert len([c for c in rivals if c.source.startswith("Table 7")]) == 16
    assert len(rivals) == 94 + 24 and all(c.value > c.than.value for c in rivals)
    cheaper = [c for c in printed("yang2024").claims("mpdp") if c.than is not None and c.metric.endswith("cost_ratio")]
    assert len(cheaper) == 3 * (4 * 4 + 2) and all(c.value < c.than.value for c in cheaper)


PLUGIN = """
from dataclasses import dataclass
from typing import ClassVar

from ppbench.api import Defense, read_paper

@dataclass(frozen=True)
class Rounding(Defense):
    name: ClassVar[str] = "{name}"
    contract: ClassVar[int] = 1
    {more}
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return a function that installs the defense "rounding" of another package, with further lines of its class."""

    def install(more: str = "pass"):
        (tmp_path / "rounding_module.py").write_text(PLUGIN.format(name="rounding", more=more))
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "rounding_module", raising=False)
        entry = metadata.EntryPoint("rounding", "rounding_module:Rounding", "ppbench.defenses")
        plugin = Plugin("defenses", "rounding", entry.value, "another", entry)
        monkeypatch.setattr("ppbench.claims.claim.find", lambda group, name: plugin if name == "rounding" else None)
        papers = papers_of.__wrapped__("rounding")  # not what was read before
        return tuple(claim for paper in papers for claim in paper.claims("rounding"))

    return install


def test_claims_of_another_package_lie_beside_its_module_and_a_wrong_file_is_left_out(installed, tmp_path):
    (tmp_path / "pyproject.toml").write_text("[project]")
    assert installed() == ()
    (tmp_path / "doe2026.claims.toml").write_text(TABLE)
    assert [claim.source for claim in installed()] == ["Table 2", "Table 2", "Table 3"]
    (tmp_path / "claims.toml").write_text("citation = 1")
    with pytest.warns(UserWarning, match=r"claims\.toml must hold a citation .*; the claims in it are left out"):
        assert len(installed()) == 3


def test_a_class_that_still_states_its_claims_is_read_and_a_wrong_one_gets_a_sentence(installed, tmp_path):
    (tmp_path / "doe2026.toml").write_text(TABLE)
    stated = (
        f'claimed: ClassVar = read_paper(__import__("pathlib").Path({str(tmp_path)!r}) / "doe2026.toml").claims(name)'
    )
    assert len(installed(stated)) == 3
    for wrong in ("(1,)", "None"):
        with pytest.warns(UserWarning, match=r"sets `claimed`, which is no tuple of claims; .* rounding\.claims\.toml"):
            assert installed(f"claimed: ClassVar = {wrong}") == ()


def test_no_defense_knows_its_claims_and_each_paper_is_cited_by_a_defense_it_is_about():
    for file in PAPERS.glob("*.toml"):
        paper = read_paper(file)
        plugins = {name: load_plugin("defenses", name) for name, _ in paper.tables}
        assert paper.citation in {plugin.paper for plugin in plugins.values()}, file
        for name, plugin in plugins.items():
            assert claims_of(name) == paper.claims(name) and not hasattr(plugin, "claimed")
