"""What a package brings that runs where the truth is: refused by name under --isolate, listed, not loaded by torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from daily import every_third
from typer.testing import CliRunner

from ppbench.adversary import isolation
from ppbench.base import registry, startup_code
from ppbench.base.errors import UsageError
from ppbench.base.startup_code import normalized, refusals
from ppbench.base.startup_code import startup_code as everywhere
from ppbench.commands import app
from ppbench.run.experiment import make_attack

ATTACK = """
from typing import ClassVar
from dataclasses import dataclass
from ppbench import Attack

@dataclass(frozen=True)
class Mine(Attack):
    name: ClassVar[str] = "mine"
"""
RUNS = "import os; open(os.environ.get('MARK', os.devnull), 'a').write('ran')\n"
MINE = {"ppbench.attacks": "mine = acme_mine:Mine"}
CACHES = (
    startup_code.trusted,
    startup_code._owners,
    isolation.check_package,
    isolation._warn_of_startup_code,
    registry.plugins,
)


def install(site, name="acme-mine", files=None, groups=None, requires=(), record=True, origin=None):
    """Write a distribution as pip leaves it."""
    files = {"acme_mine.py": ATTACK} if files is None else files
    groups = MINE if groups is None else groups
    info = f"{name.replace('-', '_')}-1.0.dist-info"
    lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", *(f"Requires-Dist: {one}\n" for one in requires)]
    entries = "".join(f"[{group}]\n{line}\n" for group, line in groups.items())
    every = {**files, f"{info}/METADATA": "".join(lines), f"{info}/entry_points.txt": entries}
    if origin is not None:
        every[f"{info}/direct_url.json"] = json.dumps({"url": origin.as_uri(), "dir_info": {"editable": True}})
    if record:
        every[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*every, f"{info}/RECORD"])
    for path, text in every.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)


own_files = startup_code._files
KEPT = {}
"""Lists of files of what is installed here anyway, by name: to read those of 200,000 files takes half a second."""


@pytest.fixture
def site(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    def files(dist):
        if Path(dist.locate_file("")) == folder:
            return own_files(dist)
        if dist.name not in KEPT:
            KEPT[dist.name] = own_files(dist)
        return KEPT[dist.name]

    monkeypatch.setattr(startup_code, "_files", files)
    for cache in CACHES:
        cache.cache_clear()
    yield folder
    monkeypatch.undo()
    for cache in CACHES:
        cache.cache_clear()


CARRIED = {  # what the attack's own distribution brings: files, entry points, and what is said of it
    "devices": ({}, {"torch.backends": "x = acme_mine:go"}, "of the group 'torch.backends', which libraries load"),
    "a library's plugin": ({}, {"pydantic": "x = acme_mine:go"}, "'pydantic', which libraries load by themselves"),
    "any other group": ({}, {"some.thing": "x = acme_mine:go"}, "declares entry points of the group 'some.thing'"),
    "scripts": ({}, {"console_scripts": "bwrap = acme_mine:go"}, "installs the command bwrap, which ppbench runs"),
    "a script": ({}, {"gui_scripts": "mine = acme_mine:go"}, "installs scripts, which stand before other commands"),
    "a line of a .pth": ({"zz.pth": RUNS}, {}, "installs 'zz.pth', of which every Python process runs a line"),
    "a tab": ({"zz.pth": "# x\nimport\tos\n"}, {}, "installs 'zz.pth', of which every Python process runs a line"),
    "a folder of a .pth": ({"zz.pth": "acme_more\n"}, {}, "installs 'zz.pth', which adds folders to the path"),
    "sitecustomize": ({"sitecustomize.py": RUNS}, {}, "installs sitecustomize, which every Python process runs"),
    "usercustomize": ({"usercustomize/__init__.py": RUNS}, {}, "installs usercustomize"),
    "a module of Python": ({"json/__init__.py": ""}, {}, "installs 'json', a name of Python"),
    "a module of ours": ({"ppbench/base/more.py": ""}, {}, "installs 'ppbench', a name of ppbench"),
    "a file of another": ({"numpy/more.py": ""}, {}, "installs 'numpy', which is of the package numpy"),
    "an optional module": (
        {"opt_einsum.py": RUNS},
        {},
        "'opt_einsum', a name that is neither its plugin's nor its own",
    ),
    "a file outside": ({"../bin/git": ""}, {}, "installs '../bin/git', outside of the folder of packages"),
    "other metadata": (
        {"b-1.dist-info/entry_points.txt": "[torch.backends]\nx=a:b\n"},
        {},
        "metadata of other packages",
    ),
}


@pytest.mark.parametrize("what", every_third(CARRIED))
def test_what_runs_beside_the_truth_is_refused_by_name_before_the_attack_is_asked(site, what):
    files, groups, words = CARRIED[what]
    install(site, files={"acme_mine.py": ATTACK, **files}, groups={**MINE, **groups})
    clauses = refusals("acme-mine", ["acme_mine"])
    assert any(words in clause for clause in clauses), clauses
    with pytest.raises(
        UsageError, match=r"'mine' of package 'acme-mine'.* cannot be kept apart: its package "
    ) as refused:
        make_attack("mine", isolate=True)
    assert "\n" not in str(refused.value) and "--no-isolate" in str(refused.value)


def test_a_package_without_a_list_of_its_files_is_refused(site):
    install(site, record=False)
    assert refusals("acme-mine", ["acme_mine"]) == ["has no list of its files (RECORD)"]


def test_a_package_of_its_own_names_alone_is_accepted_and_so_are_all_that_ppbench_requires(site):
    install(
        site,
        files={"acme_mine.py": ATTACK, "acme_mine_data/x.json": "{}", "LICENSE": ""},
        requires=["torch", "ppbench-fl"],
    )
    assert refusals("acme-mine", ["acme_mine"]) == []
    assert "torch" in startup_code.trusted() and normalized("Py_YAML.x") == "py-yaml-x"


@pytest.mark.parametrize("requires", ["acme-tools", "acme-tools>=1; extra == 'more'"])
def test_what_it_requires_may_not_bring_any_either_by_whatever_name(site, requires):
    install(site, requires=["acme-middle"])
    install(site, "acme-middle", {"middle.py": ""}, {"console_scripts": "middle = middle:main"}, requires=[requires])
    assert refusals("acme-mine", ["acme_mine"]) == [], "other packages may have commands, and modules of any name"
    install(site, "acme-tools", {"tools.py": ""}, {"console_scripts": "bwrap = tools:go"})
    assert refusals("acme-mine", ["acme_mine"]) == [
        "requires the package acme-tools, which installs the command bwrap, which ppbench runs"
    ]
    install(site, "acme-tools", {"tools.py": "", "tools.pth": RUNS}, {})
    (clause,) = refusals("acme-mine", ["acme_mine"])
    assert clause.startswith(
        "requires the package acme-tools, which installs 'tools.pth', of which every Python process"
    )


def test_the_owner_of_the_module_counts_though_nothing_requires_it(site):
    install(site, files={}, groups={"ppbench.attacks": "mine = tools:Mine"})
    install(site, "acme-tools", {"tools.py": ATTACK}, {"torch.backends": "x = tools:go"})
    assert any("requires the package acme-tools, which declares" in one for one in refusals("acme-mine", ["tools"]))


def test_an_editable_install_is_accepted_where_its_pth_is_a_path_and_refused_where_it_runs_a_line(site, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    install(site, files={"acme.pth": f"{source}\n"}, origin=source)
    (source / "acme_mine.py").write_text(ATTACK)
    assert refusals("acme-mine", ["acme_mine"]) == []
    (source / "sitecustomize.py").write_text(RUNS)
    assert any("leads to a sitecustomize" in one for one in refusals("acme-mine", ["acme_mine"]))
    line = "import __editable___acme_finder; __editable___acme_finder.install()\n"
    install(site, files={"acme.pth": line}, origin=source)
    assert any("of which every Python process runs a line" in one for one in refusals("acme-mine", ["acme_mine"]))


def test_what_others_run_everywhere_is_warned_of_and_listed(site):
    install(site)
    install(site, "stranger", {"stranger.py": "", "stranger.pth": RUNS}, {"torch.backends": "x = stranger:go"})
    (site / "stray.pth").write_text(RUNS)
    assert everywhere() == ["stranger.pth of stranger", "stray.pth of no package", "torch.backends of stranger"]
    with pytest.warns(UserWarning, match="also where the truth is: stranger.pth of stranger, stray.pth"):
        isolation.check_package(registry.plugins("attacks")["mine"])


def ran(site, tmp_path, *words, **more):
    """Run Python with `site` on its path; return what it printed and whether a marked module ran."""
    mark = tmp_path / "mark"
    mark.unlink(missing_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    way = os.pathsep.join([str(site), *filter(None, sys.path)])
    done = subprocess.run([sys.executable, *words], env={**environment, "PYTHONPATH": way, "MARK": str(mark), **more},
                          capture_output=True, text=True, timeout=120, check=False)  # fmt: skip
    return done, mark.exists()


@pytest.mark.nightly
def test_torch_loads_no_devices_of_packages_unless_asked_to(site, tmp_path):
    install(site, "device", {"device.py": RUNS + "def go(): pass\n"}, {"torch.backends": "x = device:go"})
    assert not ran(site, tmp_path, "-c", "import ppbench, torch")[1]
    assert ran(site, tmp_path, "-c", "import ppbench, torch", TORCH_DEVICE_BACKEND_AUTOLOAD="1")[1]


def test_large_tensors_lie_in_huge_pages_unless_the_user_says_otherwise(site, tmp_path, monkeypatch):
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    shown = "import ppbench, os; print(os.environ['THP_MEM_ALLOC_ENABLE'])"
    assert ran(site, tmp_path, "-c", shown)[0].stdout == "1\n"
    assert ran(site, tmp_path, "-c", shown, THP_MEM_ALLOC_ENABLE="0")[0].stdout == "0\n"


@pytest.mark.nightly
def test_an_optional_module_that_is_an_attacks_does_not_run_here_nor_in_a_worker(site, tmp_path):
    """`import torch` tries opt_einsum; the distribution may have that very name, so that its module is its own."""
    groups = {"ppbench.attacks": "mine = opt_einsum:Mine", "ppbench.defenses": "own = opt_einsum:Own"}
    install(site, "opt-einsum", {"opt_einsum.py": RUNS}, groups)
    assert ran(site, tmp_path, "-c", "import ppbench, torch")[1], "torch does not try it any more: take another one"
    close = "from ppbench.base.registry import close_attacks, find; close_attacks(); import torch"
    worker = "; import subprocess, sys; subprocess.run([sys.executable, '-c', 'import ppbench, torch'], check=True)"
    assert not ran(site, tmp_path, "-c", close + worker)[1]
    done, loaded = ran(site, tmp_path, "-c", close + "; find('defenses', 'own').loaded")
    assert loaded and "has no attribute 'Own'" in done.stderr, "a plugin that is loaded by name opens its package"


def test_the_list_names_what_isolation_refuses(site):
    install(site, files={"acme_mine.py": ATTACK, "zz.pth": RUNS})
    install(site, "stranger", {"stranger.pth": RUNS}, {})
    text = CliRunner().invoke(app, ["list", "attacks"]).stdout
    assert "refused by --isolate:\n  acme-mine        installs 'zz.pth', of which every Python process runs" in text
    assert "run in every Python process:\n  stranger.pth of stranger\n" in text
