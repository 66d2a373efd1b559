"""What papers print, kept as TOML: the figures themselves, and every way in which a file can be wrong."""

from dataclasses import replace
from pathlib import Path

import pytest

from ppbench.base.errors import UsageError
from ppbench.defenses.claims import paper
from ppbench.federation.claim import Claim, Rival, read_paper

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


def read(tmp_path: Path, text: str):
    (tmp_path / "doe2026.toml").write_text(text)
    return read_paper(tmp_path / "doe2026.toml")


def test_a_table_is_a_claim_a_row_and_keeps_what_is_printed(tmp_path):
    with pytest.raises(UsageError, match=r"none.toml cannot be read"):
        read_paper(tmp_path / "none.toml")
    found = read(tmp_path, TABLE)
    first = Claim(
        *("psnr_median", 9.0, "digits", "", None, "Table 2"),
        when=(("step", 0.1), ("law", "grid")),
        setting="digits, batch 1",
    )
    assert found.citation == "Doe et al., Rounded Uploads, 2026" and found.claims("nobody") == ()
    assert found.claims("rounding")[0] == first and found.claims("rounding")[1].value == 6.5
    assert found.claims("rounding")[2] == Claim("client_cost_ratio", 1.5, "", "", None, "Table 3")


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
    assert claim.premise == ("dataset", "model", "batch") and "epochs" in replace(claim, than=None).premise
    with pytest.raises(UsageError, match="rival: no table prints rounding beside other, source 'Table 4'"):
        read(tmp_path, TABLE + rows)
    with pytest.raises(UsageError, match="rival of source 'Table 4': metrics: Field required"):
        read(tmp_path, TABLE + rows.replace("metrics", "metric_"))


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


def test_what_the_papers_print_is_what_the_tables_of_claims_hold():
    feng2020, yang2024 = paper("feng2020"), paper("yang2024")
    errors = [c for c in feng2020.claims("pbpfl") if c.metric == "mse" and c.dataset == "bank-marketing"]
    assert len(errors) == 9 and sum(c.value for c in errors) == pytest.approx(0.727)
    assert sum(c.undefended for c in errors) == pytest.approx(0.730)
    ratios = {c.metric: round(c.value, 2) for c in feng2020.claims("pbpfl") if "ratio" in c.metric}
    assert ratios == {"upload_ratio": 3.0, "client_backward_ratio": 2.54, "client_cost_ratio": 2.5}
    mpdp = yang2024.claims("mpdp")
    assert [c.value for c in mpdp if c.metric == "asr" and c.source == "Table 4"] == [0.5030, 0.5023]
    assert [c.value for c in mpdp if c.metric == "psnr_median" and c.source == "Table 2"] == [9.22, 8.49]
    assert round(next(c.value for c in mpdp if c.metric == "client_cost_ratio"), 2) == 1.14
    assert [c.value for c in yang2024.claims("mp_cdp") if c.metric == "psnr_median"] == [12.15, 12.85]
