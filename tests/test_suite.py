"""Suites: what they expand to, what their digest says, and how a wrong one is refused."""

from pathlib import Path
from typing import Annotated

import pytest
from pydantic import ValidationError

from ppbench.base.errors import UsageError
from ppbench.records.schema import Strict
from ppbench.run.options import Option, OptionGroup, offered
from ppbench.run.suite import load_suite
from ppbench.run.sweep import plan_sweep

GOOD = """\
schema = "ppbench.run.suite/1"
id = "mine"
version = 3
title = "Mine"
seeds = [0, 1]

[task]
dataset = "digits"
clients = 4

[federation]
rounds = 5

[questions]
attacks = ["dlg", "label_recovery"]
victims = 4

[attack.dlg]
budget = 100

[[defense]]
id = "dp"
grid = [0, 0.1]

# a comment
[[defense]]
id = "ppdl"
grid = "quick"
set = { theta = 0.05 }
task = { clients = 3 }

[preset.tiny]
seeds = [7]
defenses = ["dp"]
federation = { rounds = 2 }

[preset.tiny.grids]
dp = [0.5]
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


class Planted(OptionGroup):
    share: Annotated[float | None, Option("A share.", ge=0, lt=1)] = None
    sizes: Annotated[tuple[int, ...], Option("Sizes.", max_length=2)] = (1,)
    quiet: Annotated[int, Option(ge=1)] = 1


class PlantedConfig(Planted, Strict):
    pass


def test_an_option_has_type_bounds_default_and_help_from_one_annotation():
    assert offered(Planted) == {"share": (float, "A share."), "sizes": (str, "Sizes.")}
    assert PlantedConfig().model_dump() == {"share": None, "sizes": (1,), "quiet": 1}
    for bad in ({"share": 1.0}, {"share": -0.1}, {"sizes": (1, 2, 3)}, {"quiet": 0}, {"other": 1}):
        with pytest.raises(ValidationError):
            PlantedConfig(**bad)


def test_one_evaluation_a_defense_and_seed(tmp_path):
    suite = load_suite(written(tmp_path, GOOD))
    assert suite.name == "mine/3"
    expected = [("dp", 0, 4), ("dp", 1, 4), ("ppdl", 0, 3), ("ppdl", 1, 3)]
    assert [(c.defense, c.seed, c.clients) for c in suite.configs] == expected
    first, last = suite.configs[0], suite.configs[-1]
    assert first.grid == (0, 0.1) and last.grid == "quick"
    assert first.rounds == 5 and first.victims == 4 and first.attacks == ("dlg", "label_recovery")
    assert first.settings["dlg.budget"] == 100 and last.settings["theta"] == 0.05 and "theta" not in first.settings
    assert {c.suite for c in suite.configs} == {"mine/3"} and {c.suite_digest for c in suite.configs} == {suite.digest}


def test_a_preset_names_itself_changes_the_digest_and_reduces_entries_too(tmp_path):
    path = written(tmp_path, GOOD)
    whole, tiny = load_suite(path), load_suite(path, "tiny")
    assert tiny.name == "mine@tiny/3" and tiny.digest != whole.digest
    (config,) = tiny.configs
    assert (config.defense, config.seed, config.rounds, config.grid) == ("dp", 7, 2, (0.5,))
    text = GOOD.replace("task = { clients = 3 }", "federation = { rounds = 900 }")
    assert {c.rounds for c in load_suite(written(tmp_path, text)).configs} == {5, 900}
    text = text.replace('defenses = ["dp"]', 'defenses = ["dp", "ppdl"]')
    assert {c.rounds for c in load_suite(written(tmp_path, text), "tiny").configs} == {2}


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ('id = "dp"\ngrid = [0, 0.1]', 'id = "dp"\ngrid = [0, 0.1, 0.5]', True),
        ('["dlg", "label_recovery"]', '["dlg"]', True),
        ("seeds = [0, 1]", "seeds = [0, 1, 2]", True),
        ("# a comment", "# another", True),
        ('dataset = "digits"\n', 'dataset = "shapes"\n', True),  # cells know their data by content
        ("rounds = 5", "rounds = 6", False),
        ("victims = 4", "victims = 8", False),
        ("version = 3", "version = 4", False),
        ("clients = 4", "clients = 5", False),
        ('title = "Mine"', 'title = "Mine"\nbase = "paper"', False),
    ],
)
def test_the_digest_is_of_what_cells_share(tmp_path, old, new, same):
    """A suite may grow by defenses, control values, attacks and seeds without making its old cells incomparable."""
    assert GOOD.count(old) == 1
    one, other = load_suite(written(tmp_path, GOOD)), written(tmp_path, GOOD.replace(old, new))
    assert (load_suite(other).digest == one.digest) is same


@pytest.mark.parametrize(
    ("old", "new", "line", "key", "what"),
    [
        ('["dlg", "label_recovery"]', "[]", 15, "questions.attacks", "No attack is named"),
        ("grid = [0, 0.1]", "grid = [nan]", 23, "defense.1.grid", "finite number"),
        ("grid = [0, 0.1]", "grid = []", 23, "defense.1.grid", "at least 1 item"),
        ("rounds = 5", "rounds = 0", 12, "federation.rounds", "greater than or equal to 1"),
        ("rounds = 5", "round = 5", 12, "federation.round", "did you mean 'rounds'"),
        ("victims = 4", 'victims = "many"', 16, "questions.victims", "valid integer"),
        ('id = "ppdl"', 'id = "ppld"', 26, "defense.2", "did you mean 'ppdl'"),
        ("theta = 0.05", "teta = 0.05", 26, "defense.2", "did you mean 'theta'"),
        ("[attack.dlg]", "[attack.dgl]", 18, "attack.dgl", "or 'dlg'"),
        ("budget = 100", "bugdet = 100", 18, "attack.dlg", "did you mean 'budget'"),
        ('id = "mine"', 'id = "My suite"', 2, "id", "match pattern"),
        ("version = 3\n", "", 1, "version", "required"),
        ('"ppbench.run.suite/1"', '"ppbench.run.suite/2"', 1, "schema", "ppbench.run.suite/1"),
        ('defenses = ["dp"]', 'defenses = ["spn"]', 34, "preset.tiny.defenses", "defense of the suite"),
        ("dp = [0.5]", "spn = [0.5]", 37, "preset.tiny.grids", "defense of the suite"),
        ("grid = [0, 0.1]", 'grid = "large"', 23, "defense.1.grid", "quick"),
        ("task = { clients = 3 }", "task = { client = 3 }", 30, "defense.2.task.client", "did you mean 'clients'"),
        ("seeds = [0, 1]", "seeds = []", 5, "seeds", "at least 1"),
    ],
)
def test_a_wrong_suite_is_refused_with_file_line_and_key(tmp_path, old, new, line, key, what):
    assert GOOD.count(old) == 1
    path = written(tmp_path, GOOD.replace(old, new))
    with pytest.raises(UsageError) as caught:
        load_suite(path)
        load_suite(path, "tiny")
    message = str(caught.value)
    assert message.startswith(f"{path}, line {line}, key {key}: "), message
    assert what in message and "\n" not in message


def test_what_is_no_toml_is_told_with_its_line(tmp_path):
    with pytest.raises(UsageError, match=r"mine.toml is no TOML: .*line 3"):
        load_suite(written(tmp_path, GOOD.replace("version = 3", "version = ")))
    with pytest.raises(UsageError, match="There is no suite file"):
        load_suite(tmp_path / "absent.toml")
    with pytest.raises(UsageError, match="did you mean 'digits-quick'"):
        load_suite("digits-quik")
    with pytest.raises(UsageError, match="no preset of suite 'mine' named 'tinny'; did you mean 'tiny'"):
        load_suite(written(tmp_path, GOOD), "tinny")
    (tmp_path / "mine.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot be read as a suite"):
        load_suite(tmp_path / "mine.toml")


def test_a_defense_may_be_added_and_data_lie_elsewhere(tmp_path, monkeypatch):
    path = written(tmp_path, GOOD)
    suite = load_suite(path, add=("spn", "dp"), dataset="imagefolder:here")
    assert [c.defense for c in suite.configs] == ["dp", "dp", "ppdl", "ppdl", "spn", "spn"]
    assert {c.dataset for c in suite.configs} == {"imagefolder:here"}
    assert suite.digest == load_suite(path).digest
    with pytest.raises(UsageError, match=r"^Option --add spm cannot be used: .*no defense named 'spm'"):
        load_suite(path, add=("spm",))
    monkeypatch.setenv("PPBENCH_DATA", "/somewhere")
    path = written(tmp_path, GOOD.replace('"digits"', '"parquet:{data}/mnist"'))
    assert load_suite(path).configs[0].dataset == "parquet:/somewhere/mnist"


def test_attacks_built_for_one_defense_are_left_out_of_the_others(tmp_path):
    text = GOOD.replace('["dlg", "label_recovery"]', '["dlg", "adaptive_dp", "adaptive_ppdl"]')
    results = {c.defense: c.attacks for c in load_suite(written(tmp_path, text)).configs}
    assert results == {"dp": ("dlg", "adaptive_dp"), "ppdl": ("dlg", "adaptive_ppdl")}
    with pytest.raises(UsageError, match=r"line 15, key questions.attacks: .*did you mean 'adaptive_dp'"):
        load_suite(written(tmp_path, GOOD.replace('["dlg", "label_recovery"]', '["dlg", "adaptive_dq"]')))
    own = GOOD.replace("grid = [0, 0.1]", 'grid = [0, 0.1]\nquestions = { attacks = ["adaptive_ppdl"] }')
    with pytest.raises(UsageError, match="built for ppdl, not for 'dp'"):  # named for this defense: a mistake
        load_suite(written(tmp_path, own))


def test_what_only_the_data_show_is_refused_with_its_place(tmp_path):
    path = written(tmp_path, GOOD.replace("grid = [0, 0.1]", "grid = [-1]"))
    with pytest.raises(UsageError, match=rf"^{path}, line 21, key defense.1: .*sigma=-1"):
        plan_sweep(load_suite(path), tmp_path / "out")
