"""The command line, as a user meets it."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from functools import cache
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ppbench
from ppbench import commands as cli
from ppbench.base import registry
from ppbench.base.errors import UsageError
from ppbench.base.registry import summary
from ppbench.records.store import Store
from ppbench.run.group import drafts_of

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
ROOT = Path(__file__).parent.parent
QUICK = ["--grid", "0.1", "--clients", "2", "--rounds", "1", "--victims", "2", "--attack-batch", "1", "--stage", "init"]


def call(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["ppbench", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    text = capsys.readouterr()
    return int(stop.value.code or 0), text.out, text.err


def test_what_is_quick_to_ask_imports_nothing_heavy():
    """The pytest plugin, the batteries, records, help and lists, in one process that begins with the lightest."""
    code = (
        "import sys\nheavy = {'torch', 'sklearn', 'pandas', 'matplotlib'}\n"
        "import ppbench.testing.pytest_plugin\nassert not {*heavy, 'numpy', 'pydantic'} & set(sys.modules)\n"
        "import ppbench.testing, ppbench.records.schema, ppbench.records.store\nassert 'torch' not in sys.modules\n"
        "from ppbench import commands as cli\n"
        "for words in (['--help'], ['list'], ['evaluate', '--help'], ['--version']):\n"
        "    sys.argv = ['ppbench', *words]\n"
        "    try: cli.main()\n"
        "    except SystemExit: pass\n"
        "    assert not heavy & set(sys.modules), words"
    )
    for once in (code, "import sys, ppbench.commands\nassert 'pydantic' not in sys.modules, 'options wait for it'"):
        done = subprocess.run([sys.executable, "-c", once], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["compare", "evaluate", "leaderboard", "verify", "publish", "submit"])
def test_help_breaks_lines_at_the_edge_of_the_screen_alone(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = call(monkeypatch, capsys, command, "--help")
    about = [line.strip() for line in out.partition("╭")[0].splitlines()]
    paragraphs = [[*lines] for full, lines in itertools.groupby(about, bool) if full][1:]  # after the usage
    assert len(paragraphs) >= 2
    for line, after in itertools.chain.from_iterable(map(itertools.pairwise, paragraphs)):
        assert len(f"{line} {after.split()[0]}") > 78, f"{line!r} ends early"


def test_list_names_every_plugin_with_a_sentence(monkeypatch, capsys):
    code, out, _ = call(monkeypatch, capsys, "list")
    assert code == 0
    lines = [line.split(maxsplit=1) for line in out.splitlines() if line.startswith("  ")]
    for group in registry.PLUGIN_GROUPS:
        for name, plugin in registry.plugins(group).items():
            if plugin.ours:
                assert any(line[0] == name and len(line) == 2 for line in lines), name
    assert "broken" not in out


def test_evaluate_says_what_was_found_in_words_and_in_json_alone(monkeypatch, capsys, tmp_path):
    words = ["evaluate", "--defense", "spn", *QUICK, "--attack", "dlg,label_recovery", "--set", "dlg.budget=300"]
    words += ["--rounds", "12", "--model", "mlp"]
    words += ["--out", str(tmp_path / "o"), "--workers", "1"]
    code, out, _ = call(monkeypatch, capsys, *words)
    assert code == 0
    first, second, *_ = out.splitlines()
    assert first.startswith("spn ") and "undefended" in first and second.startswith("Controls hold")
    assert "alpha2=0.1" in out and "control none" not in out, "the rest is for who asks"
    code, full, _ = call(monkeypatch, capsys, *words, "--full")
    for word in (first, "accuracy", "Labels recovered", "control none", "control full_noise", "spn at alpha2=0.1"):
        assert word in " ".join(full.split())
    code, out, _ = call(monkeypatch, capsys, *words, "--json")
    result = json.loads(out)
    assert result["headline"] == first and result["reliability"]["sentence"] in " ".join(full.split())
    assert result["reliable"] is True and {"level", "qualifiers"} <= set(result["verdicts"][0])
    assert code == 0 and {c["defense"] for c in result["cells"]} == {"none", "full_noise", "spn"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["evaluate", "--defense", "spm"], "did you mean 'spn'"),
        (["evaluate", "--defense", "spn", "--grid", "a,b"], "--grid"),
        (["evaluate", "--defense", "spn", "--attack-batch", "1,x"], "--attack-batch"),
        (["evaluate", "--defense", "spn", "--set", "alpha2"], "--set"),
        (["evaluate", "--defense", "spn", "--preset", "fast"], "preset"),
        (["evaluate", "--defense", "spn", "--stage", "middle"], "stage"),
        (["evaluate", "--defense", "spn", "--device", "tpu"], "device"),
        (["evaluate", "--defense", "spn", "--attack", "dlg", "--set", "idlg.bar=3"], "'bar'"),
        (["evaluate", "--defense", "spn", "--attack", ""], "after '--attack' is empty"),
        (["evaluate", "--defense", "spn", "--attack", "mia_loss", "--stage", "init"], "nothing to evaluate"),
        (["evaluate", "--defense", "spn", "--workers", "0"], "workers=0"),
        (["leaderboard", "/no/such/folder"], "/no/such/folder"),
        (["verify", "/no/such/folder"], "/no/such/folder"),
        (["claims", "/no/such/folder"], "/no/such/folder"),
        pytest.param(["evaluate", "--defense", "spn", "--device", "cuda"], "no GPU", marks=NO_GPU),
    ],
)
def test_bad_input_exits_with_2_and_one_sentence(words, sentence, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(monkeypatch, capsys, *words)
    assert code == 2
    assert sentence in err and out == ""
    assert len(err.strip().splitlines()) == 1 and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_claims_of_several_folders_are_the_same_file_twice(fabricate, tmp_path, monkeypatch, capsys):
    for folder, defense, share in (("one", "none", 0.71), ("one", "full_noise", 0.5), ("two", "pbpfl", 0.71)):
        Store(tmp_path / folder).save(fabricate(defense, None, "mia_loss", "membership", share))
    first, second = str(tmp_path / "one"), str(tmp_path / "two")
    code, out, _ = call(monkeypatch, capsys, "claims", first, second, "--to", str(tmp_path / "a.md"))
    assert code == 0 and out.strip() == str(tmp_path / "a.md")
    code, out, _ = call(monkeypatch, capsys, "claims", second, first)
    assert code == 0 and out == (tmp_path / "a.md").read_text() and out.startswith("# What papers claim")
    code, out, err = call(monkeypatch, capsys, "claims", first, "--to", str(tmp_path / "no" / "such.md"))
    assert code == 2 and out == "" and "There is no folder" in err


def test_a_third_partys_broken_plugin_is_named_takes_nothing_down_and_no_name_of_ours(monkeypatch):
    real = metadata.entry_points
    places = {"bad": "no_such_package_xyz:Attack", "dlg": "os:getcwd"}
    entries = [metadata.EntryPoint(name, place, "ppbench.attacks") for name, place in places.items()]
    for entry in entries:
        vars(entry).update(dist=SimpleNamespace(name="other"))
    more = {"ppbench.attacks": entries}
    monkeypatch.setattr(metadata, "entry_points", lambda group: [*real(group=group), *more.get(group, ())])
    monkeypatch.setattr(registry, "plugins", cache(registry.plugins.__wrapped__))
    with pytest.warns(UserWarning, match="'dlg' is provided by .*other"):
        assert registry.plugins("attacks")["dlg"].distribution == registry.DISTRIBUTION
    with pytest.warns(UserWarning, match=r"'bad'.*'other'.*no_such_package_xyz"):
        loaded = registry.load_all("attacks")
    assert "bad" not in loaded and "dlg" in loaded
    with pytest.raises(UsageError, match="repair or uninstall"):
        registry.load_plugin("attacks", "bad")
    assert summary(registry.plugins("attacks")["bad"]).startswith("broken")


def test_a_checkout_that_shadows_an_installed_ppbench_still_has_its_plugins(tmp_path):
    """`python -c "import ppbench"` in a clone finds the folder ppbench/ first: it must be the whole package."""
    words = "ppbench.defenses.spn", "ppbench.attacks.reconstruction.dlg"
    code = f"from importlib.util import find_spec; print(*(find_spec(name).origin for name in {words}))"
    ran = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {[str(ROOT), *sys.path[1:]]!r}; {code}"],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert all(path.startswith(str(ROOT / "ppbench")) for path in ran.stdout.split())


def test_python_m_ppbench_is_the_command():
    ran = subprocess.run([sys.executable, "-m", "ppbench", "--version"], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout.split()[0]) == (0, "ppbench"), ran.stderr


@pytest.mark.usefixtures("planted")
def test_an_interrupt_ends_soon_with_a_sentence_and_keeps_what_is_finished(forked, tmp_path, monkeypatch):
    """While workers sleep in an attack, for minutes, after another cell of each was finished."""
    words = ["evaluate", "--defense", "none", *QUICK[2:], "--attack", "label_recovery,planted_slow", "--workers", "2"]
    words += ["--set", "planted_slow.seconds=600", "--out", str(tmp_path / "o")]
    monkeypatch.setattr(sys, "argv", ["ppbench", *words])
    monkeypatch.setenv("PPBENCH_PLANTED_LOG", str(tmp_path / "log"))

    def command():
        with (tmp_path / "said").open("w") as log:
            sys.stdout = sys.stderr = log
            signal.signal(signal.SIGINT, signal.default_int_handler)
            cli.main()

    process = forked.Process(target=command)
    process.start()
    while not (tmp_path / "log").is_file() and process.is_alive():
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    process.join(120)
    process.kill()
    log = (tmp_path / "said").read_text()
    assert process.exitcode == 130, log
    assert "the same command goes on from there" in log and "Traceback" not in log
    finished = [*Store(tmp_path / "o").load_all(), *drafts_of(tmp_path / "o").load_all()]
    assert {r.config.attack.id for r in finished} == {"label_recovery"}


def test_the_public_names_stay_what_they_are_after_their_modules_are_imported():
    for _ in range(2):
        for name in ppbench.__all__:
            module = isinstance(getattr(ppbench, name), type(ppbench))
            assert module == (name == "plot"), f"ppbench.{name} is a module"  # plot is one: a namespace of figures
    assert callable(ppbench.evaluate)
