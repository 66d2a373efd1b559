"""The gate for plugins: broken packages of every kind end as a sentence that names them, and harm nobody else."""

import contextlib
import dataclasses
import io
import sys
import warnings
from collections import Counter
from unittest.mock import patch

import pytest
import torch
from broken_plugins import chosen, everything
from typer.testing import CliRunner

from ppbench.base import fence as blame
from ppbench.base import registry
from ppbench.base import registry as entries
from ppbench.base.errors import PluginError, UsageError
from ppbench.commands import app
from ppbench.records.store import Store
from ppbench.run.config import configure
from ppbench.run.evaluation import check_experiment
from ppbench.run.executors.local import InlineExecutor
from ppbench.run.experiment import resolve
from ppbench.run.schedule import Scheduler, plan_cells, strands

TINY = {
    **{"dataset": "digits", "model": "mlp", "train": 40, "clients": 2, "rounds": 1, "victims": 2, "candidates": 8},
    **{"attack_batch": (1,), "stages": ("init",), "tuning": 0, "loss": "cross_entropy"},
}


class Quiet:
    """Hears of progress and says nothing."""

    def expect(self, phase, steps): ...
    def advance(self, phase, steps): ...
    def cell(self, status, about=""): ...
    def ready(self, records): ...
    def say(self, line): ...


@contextlib.contextmanager
def site(folder, packages):
    """Let this process find packages as if they were installed, and forget them again."""
    for one in packages:
        one.write(folder)
    before, modules = sys.path[:], set(sys.modules)
    sys.path.insert(0, str(folder))
    caches = (registry.plugins, entries._unreadable)
    for cache in caches:
        cache.cache_clear()
    try:
        yield
    finally:
        sys.path[:] = before
        for name in set(sys.modules) - modules:
            if name.startswith("bad_package_"):
                del sys.modules[name]
        for cache in caches:
            cache.cache_clear()


def use(one, out):
    """Ask for a broken plugin; return how that ended: "refused", "failed", or what its cells say."""
    attack = one.name if one.group == "attacks" else "label_recovery"
    options = {**TINY, "attacks": (attack,), "defense": one.name if one.group == "defenses" else "none"}
    options |= {"dataset": one.name} if one.group == "datasets" else {}
    options |= {"model": one.name} if one.group == "models" else {}
    try:
        if one.group == "questions":
            registry.load_plugin("questions", one.name)
        experiment = resolve(configure("quick", **options))
        check_experiment(experiment)
        words = [
            w for w in plan_cells([experiment]) if experiment.points[w.group.point].defense.name == options["defense"]
        ]
        store = Store(out)
        store.prepare()
        Scheduler(store, InlineExecutor(lambda _: None), Quiet(), strict=True).run(strands(words, out))
    except UsageError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000 and str(error).isprintable(), str(error)
        assert isinstance(error, PluginError) is (one.module in str(error)) or one.about == "metadata", str(error)
        return "refused"
    records = [store.load(cell.id) for w in words for cell in w.cells]
    assert records
    for record in records:
        assert record.status != "failed" or "\n" not in record.reason
    (status,) = {record.status for record in records}
    if status == "failed":
        mute = "attack 'label_recovery': nothing in the view of server/1 can be read"  # of who sends nothing
        assert all(one.module in r.reason or r.reason == mute for r in records), records[0].reason
    return status


def listed(arguments=("list",)):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return CliRunner().invoke(app, list(arguments)), [str(w.message) for w in caught]


@pytest.fixture(scope="module")
def packages(request):
    return chosen(300 if request.config.getoption("--battery") == "whole" else 40)


def test_no_broken_package_raises_anything_but_a_sentence(packages, tmp_path, capsys):
    """Each alone, asked for: refused before anything runs, or its cells fail with a sentence."""
    ended, wrong = Counter(), []
    default = torch.get_default_dtype(), torch.is_grad_enabled()
    for one in packages:
        folder = tmp_path / one.name
        folder.mkdir()
        with site(folder, [one]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                status = use(one, tmp_path / "out" / one.group)
            except BaseException as error:  # noqa: BLE001 - whatever comes out is what is looked for
                status = f"{type(error).__name__}: {error}"
                wrong.append(f"{one.about} {one.group}: {one.source[-120:]}{one.entries} -> {status}")
        ended[f"{one.about} {one.group}", status] += 1
        if one.reported and status != "refused":
            wrong.append(f"not refused: {one.source[-120:]}{one.entries}")
    assert not wrong, "\n".join(wrong)
    assert (torch.get_default_dtype(), torch.is_grad_enabled()) == default
    with capsys.disabled():
        if len(packages) == 300:
            print("", *sorted((*key, count) for key, count in ended.items()), sep="\n")
    complete = sum(count for (_, status), count in ended.items() if status == "complete")
    assert complete <= len(packages) // 10, ended  # answers that are odd and do no harm


def test_all_of_them_together_leave_list_and_what_others_ask_for_as_it_is(packages, tmp_path):
    plain, _ = listed()
    before = resolve(configure("quick", **TINY, defense="dp"))
    names = {attack.name for attack in before.attacks}
    with site(tmp_path, packages):
        result, _ = listed()
        assert result.exit_code == 0 and result.exception is None
        assert [line for line in result.stdout.splitlines() if "bad_" not in line] == plain.stdout.splitlines()
        for one in packages:
            if one.reported:
                (line,) = [line for line in result.stdout.splitlines() if line.split()[:1] == [one.name]]
                assert "broken: The " in line and one.module in line
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            after = resolve(configure("quick", **TINY, defense="dp"))
            check_experiment(after)
            left = {attack.name for attack in after.attacks}
        assert {name for name in left if not name.startswith("bad_")} == names
        texts = [str(warning.message) for warning in caught]
        assert len(texts) == len(set(texts)) and all("left out" in text and "\n" not in text for text in texts)
        broken = [one.name for one in packages if one.group == "attacks" and one.reported and one.about != "metadata"]
        assert broken and not left & {*broken}
        for name in broken:
            assert sum(repr(name) in text for text in texts) == 1


def test_every_class_of_fault_is_in_the_sample():
    some, every = chosen(40), everything()
    assert {(one.about, one.group) for one in some} == {(one.about, one.group) for one in every} and len(every) > 300
    assert chosen(40) == some and len(chosen(300)) == 300


# -- the cases that were found, by name --------------------------------------------------------------------------------
GOOD = """
from dataclasses import dataclass
from typing import ClassVar
from ppbench.defenses.dp import DP
@dataclass(frozen=True)
class My(DP):
    name: ClassVar[str] = "bad_0"
"""


def package(source, **changes):
    return dataclasses.replace(everything()[0], source=source, group="defenses", entries="", **changes)


@pytest.mark.parametrize(
    ("old", "new", "right"),
    [
        ('    name: ClassVar[str] = "bad_0"', "    pass", "has no name of its own"),
        ('"bad_0"', '"none"', "has the name 'none', its entry point 'bad_0'; make them equal"),
        ('"bad_0"', '"bad_0"\n    roles: ClassVar = ()', "roles = (); it must not be empty"),
    ],
)
def test_a_result_is_never_kept_under_anothers_name(old, new, right, tmp_path):
    with site(tmp_path, [package(GOOD.replace(old, new))]), pytest.raises(PluginError) as refused:
        registry.load_plugin("defenses", "bad_0")
    assert right in str(refused.value) and "'bad_package_0'" in str(refused.value) and "'bad_0'" in str(refused.value)


def test_a_sound_plugin_is_admitted_and_a_control_of_a_third_party_is_not(tmp_path):
    with site(tmp_path, [package(GOOD)]):
        assert registry.load_plugin("defenses", "bad_0").name == "bad_0" and blame.third_party("defenses", "bad_0")
    entry = registry.metadata.EntryPoint("none", "bad_package_0:My", "ppbench.defenses")
    foreign = registry.Plugin("defenses", "none", entry.value, "x", entry)
    assert next(registry._faults(foreign, object)).startswith("has a name with another meaning")


def test_the_code_of_a_third_partys_plugin_is_in_the_names_of_its_cells_and_trainings(tmp_path):
    from ppbench.report.compare.join import where_of
    from ppbench.report.frame import key_of
    from ppbench.run.train import home_of

    def named(folder, source):
        folder.mkdir()
        with site(folder, [package(source)]):
            registry_caches()
            experiment = resolve(configure("quick", **TINY, defense="bad_0", attacks=("label_recovery",)))
            configs = [cell.config for w in plan_cells([experiment]) for cell in w.cells]
            homes = {p.defense.name: home_of(experiment, p, folder).name for p in experiment.points}
            return {c.defense.id: c for c in configs}, homes

    one, homes = named(tmp_path / "a", GOOD)
    two, others = named(tmp_path / "b", GOOD + "# edited\n")
    same, again = named(tmp_path / "c", GOOD)
    mine = one["bad_0"]
    assert mine.cell_id() != two["bad_0"].cell_id() and homes["bad_0"] != others["bad_0"]
    assert mine == same["bad_0"] and homes == again
    assert one["none"] == two["none"] and one["none"].defense.code == "" and "code" not in one["none"].model_dump_json()
    assert where_of(mine) == where_of(two["bad_0"]) and key_of(mine) != key_of(two["bad_0"])


def registry_caches():
    from ppbench.records.sources import code_of

    code_of.cache_clear()


# -- guard and blame ---------------------------------------------------------------------------------------------------
def test_a_guard_names_who_raised_and_lets_ours_and_interrupts_pass(tmp_path):
    source = GOOD + "    def boom(self, what):\n        raise what\n"
    with site(tmp_path, [package(source)]):
        made = registry.load_plugin("defenses", "bad_0")()
        message = r"'bad_0' of package 'bad_package_0'.* raised SystemExit: 0 \(bad_package_0.py, line 9\)"
        with pytest.raises(PluginError, match=message), blame.guard():
            made.boom(SystemExit(0))
        for passes in (KeyboardInterrupt(), UsageError("x")):
            with pytest.raises(type(passes)), blame.guard("defenses", "bad_0"):
                made.boom(passes)
        message = "ZeroDivisionError: division by zero in ppbench's own code, on its result"
        with pytest.raises(PluginError, match=message), blame.guard("defenses", "bad_0"):
            1 / 0  # noqa: B018
        with pytest.raises(ZeroDivisionError), blame.guard("defenses", "dp"):
            1 / 0  # noqa: B018
        with pytest.raises(ZeroDivisionError) as ours:
            1 / 0  # noqa: B018
        assert blame.blame(ours.value) is None
        with pytest.raises(OSError) as theirs:
            made.boom(OSError("full"))
        assert blame.blame(theirs.value) is registry.plugins("defenses")["bad_0"]


def test_what_is_printed_at_import_is_no_part_of_what_a_command_says(tmp_path):
    source = "import os, torch\nprint('noise')\nos.chdir('/')\ntorch.set_default_dtype(torch.float64)\n" + GOOD
    folder, out = registry.Path.cwd(), io.StringIO()
    with site(tmp_path, [package(source)]), contextlib.redirect_stdout(out):
        registry.load_plugin("defenses", "bad_0")
    assert registry.Path.cwd() == folder and out.getvalue() == "" and torch.get_default_dtype() == torch.float32


def test_an_interrupt_of_the_users_while_a_module_is_imported_is_one(tmp_path):
    import signal

    source = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n" + GOOD
    with patch.object(registry.multiprocessing, "parent_process", lambda: None):
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with site(tmp_path, [package(source)]), pytest.raises(KeyboardInterrupt):
                registry.load_plugin("defenses", "bad_0")
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        finally:
            signal.signal(signal.SIGINT, before)
