"""The page of claims: a function of claims, records and figures, that no name of others can break; its command."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ppbench import cli
from ppbench.federation.contract import Claim
from ppbench.records.schema import Record
from ppbench.records.store import Store
from ppbench.report.claims import check
from ppbench.report.claims.page import escape, page
from ppbench.report.claims.use import Benchmark

Make = Callable[..., Record]
ASR = Claim("asr", 0.5030, "cifar10", "resnet20", None, "Table 4", undefended=0.7201)
READ = Claim("agreement", None, "", "", None, "Lemma 3", note="clients cannot obtain the true prediction")
UPLOAD = Claim("upload_ratio", 3.0, "", "resnet56", None, "Sec. 5.2.3")
TIME = Claim("client_backward_ratio", 2.54, "", "resnet56", None, "Table 3")


@pytest.fixture
def records(fabricate: Make) -> list[Record]:
    """Return a masked defense whose mask comes off, beside the controls."""
    found = [fabricate(d, None, "mia_loss", "membership", s) for d, s in (("none", 0.71), ("full_noise", 0.5))]
    found += [fabricate(d, None, "mia_loss", "membership", s, stage="iterate")
              for d, s in (("none", 0.71), ("full_noise", 0.5))]  # fmt: skip
    found.append(fabricate("pbpfl", 10.0, "mia_loss", "membership", 0.71))
    found.append(fabricate("pbpfl", 10.0, "mia_loss", "membership", 0.5, stage="iterate"))
    return [*found, fabricate("pbpfl", 10.0, "unmask", "membership", 0.71, adaptive=True, stage="iterate")]


EVIL = "a|b\nc <script>`x`</script> *y* [z](http://w) _q_"


def cells(line: str) -> list[str]:
    return re.split(r"(?<!\\)\|", line)[1:-1]


def test_the_page_is_the_same_whatever_the_order_and_cannot_be_broken_by_names(
    fabricate: Make, records: list[Record]
) -> None:
    evil = [fabricate("pbpfl", 10.0, EVIL, "extraction", 0.1, stage="iterate", dataset=EVIL)]
    claims = {"pbpfl": [ASR, replace(READ, source=EVIL, note=EVIL), UPLOAD], "spn": [UPLOAD]}
    records = records + evil
    benchmarks = [Benchmark("pbpfl", EVIL, {"backward_ratio": 2.0}, EVIL, "2026")]
    claims["pbpfl"].append(replace(TIME, setting=EVIL))
    text = page(check(claims, records, benchmarks), records, benchmarks)
    twice = [*records[::-1], *records]
    assert text == page(check(claims, twice, benchmarks), twice, benchmarks)
    assert "<script>" not in text and "](http" not in text.replace("\\]", "")
    assert escape("unmask_regression 71.0%") == "unmask_regression 71.0%"
    assert escape("_a_ b_c *d* `e` <f> x|y\n z") == "\\_a\\_ b_c \\*d\\* \\`e\\` &lt;f&gt; x\\|y z"
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 4 and {len(cells(line)) for line in table} == {9}
    assert all(f"`{r.cell_id[:8]}`" in text for r in records if r.config.attack.id == "unmask")
    assert "- spn: 1 claim. Not checked: no record of spn." in text
    assert "Of 4 claims that could be checked 2 hold, 1 fall, and of 1 it cannot be told." in text
    assert "of ppbench 0.1.0, seed 0, and 1 benchmarks" in text


def test_many_claims_of_a_table_that_nothing_compares_with_are_one_line(fabricate: Make) -> None:
    record = fabricate("pbpfl", 10.0, "mia_loss", "membership")
    table = [
        Claim("accuracy", 0.8 + k / 100, data, "", None, "Table 1", when=(("k", float(k)),), undefended=0.9)
        for data in ("mnist", "cifar10")
        for k in range(8)
    ]
    few = [Claim("bytes_saving", 0.5, "", "", None, "Eq. 8", clients=n) for n in (3, 4)]
    assert page(check({"pbpfl": [*table, *few]}, [record], []), [record], []).count("\n- pbpfl") == 2
    text = page(check({"pbpfl": [*table, *few]}, [record], []), [record], [])
    line = "- pbpfl, Table 1: 16 claims (accuracy 80.00% to 87.00%). Not comparable: no record of mnist; cifar10."
    assert line in text
    assert "- pbpfl, Eq. 8: saved bytes 50.00%. Not comparable: no record of 3 clients; 4 clients." in text


def call(monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["ppbench", "claims", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    text = capsys.readouterr()
    return int(stop.value.code or 0), text.out, text.err


def test_the_command_reads_several_folders_and_writes_the_same_file_twice(
    records: list[Record], tmp_path: Path, monkeypatch, capsys
) -> None:
    for place, record in enumerate(records):
        Store(tmp_path / ("one" if place < 3 else "two")).save(record)
    first, second = str(tmp_path / "one"), str(tmp_path / "two")
    code, out, _ = call(monkeypatch, capsys, first, second, "--to", str(tmp_path / "a.md"))
    assert code == 0 and out.strip() == str(tmp_path / "a.md")
    code, out, _ = call(monkeypatch, capsys, second, first)
    assert code == 0 and out == (tmp_path / "a.md").read_text() and out.startswith("# What papers claim")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["/no/such/folder"], "/no/such/folder is no folder"),
        (["{tmp}/empty"], "holds no records"),
        (["{tmp}/full", "--figures", "{tmp}/none.json"], "none.json cannot be read as JSON"),
        (["{tmp}/full", "--to", "{tmp}/no/such.md"], "There is no folder"),
    ],
)
def test_bad_input_is_one_sentence(
    words: list[str], sentence: str, fabricate: Make, tmp_path: Path, monkeypatch, capsys
) -> None:
    (tmp_path / "empty").mkdir()
    Store(tmp_path / "full").save(fabricate("pbpfl", 10.0, "mia_loss", "membership"))
    before = sorted(tmp_path.rglob("*"))
    code, out, err = call(monkeypatch, capsys, *(word.format(tmp=tmp_path) for word in words))
    assert code == 2 and sentence in err and out == "" and len(err.strip().splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before
