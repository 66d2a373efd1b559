"""An installation that another distribution's package `ppbench` has damaged is told in a sentence, with its repair.

Installations are made in earnest, as pip lays them out: a folder with the package, `ppbench_fl.py` and a `dist-info`
with its list of files. The other distribution is a wheel, made by hand and unpacked over it.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from daily import all_but_nightly

ROOT = Path(__file__).resolve().parents[1]
OTHER = "ppbench"  # put together: test_distribution.py searches for commands that would fetch the other package
UNINSTALL, AGAIN = f"pip uninstall {OTHER}", "pip install --force-reinstall --no-deps ppbench-fl"
HARMLESS = {"ppbench/__init__.py": '"""Puzzles."""\n', "ppbench/puzzle.py": "class Puzzle: ...\n"}
RAISING = {**HARMLESS, "ppbench/__init__.py": "import no_such_module_of_puzzles\n"}
COMMANDS = {
    "ppbench/commands/__init__.py": "def main():\n    print('puzzles')\n",
    "ppbench/__main__.py": "print('puzzles')\n",
}
tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Site:
    """A folder with installed distributions, first on the path of the commands that are run."""

    folder: Path

    def run(self, *words: str, before: Path | None = None) -> Done:
        """Run Python on this path; before: a folder in front of it."""
        path = os.pathsep.join(str(part) for part in (before, self.folder) if part is not None)
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("COV_", "PYTEST"))}
        ended = subprocess.run(
            [sys.executable, *words], env={**environment, "PYTHONPATH": path}, cwd=self.folder.parent, text=True,
            capture_output=True, check=False, timeout=120,
        )  # fmt: skip
        return Done(ended.returncode, ended.stdout, ended.stderr)

    def command(self, *words: str, before: Path | None = None) -> Done:
        """Run the script that pip makes of our entry point."""
        module, _, function = PROJECT["scripts"]["ppbench"].partition(":")
        script = (
            f"import sys; sys.argv = {['ppbench', *words]!r}; from {module} import {function}; sys.exit({function}())"
        )
        return self.run("-c", script, before=before)

    def install(self, wheel: bytes) -> None:
        """Unpack a wheel, as pip does."""
        with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
            for name in archive.namelist():
                (self.folder / name).unlink(missing_ok=True)
                archive.extract(name, self.folder)

    def uninstall(self, info: str) -> None:
        """Remove what the list of files of a distribution names."""
        for line in (self.folder / info / "RECORD").read_text().splitlines():
            (self.folder / line.split(",")[0]).unlink(missing_ok=True)


def wheel_of(files: dict[str, str], name: str = OTHER, version: str = "0.3.0") -> bytes:
    """Return a wheel with these files, its metadata and the list of all."""
    info = f"{name}-{version}.dist-info"
    every = {**files, f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"}
    record = "".join(f"{path},sha256=x,{len(text.encode())}\n" for path, text in every.items())
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, text in {**every, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(path, text)
    return buffer.getvalue()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Return a whole installation of this checkout."""
    folder = tmp_path / "site"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "ppbench", folder / "ppbench", ignore=ignored)
    shutil.copy(ROOT / "ppbench_fl.py", folder)
    info = folder / "ppbench_fl-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ppbench-fl\nVersion: 0.1.0\n")
    groups = {"console_scripts": PROJECT["scripts"], **PROJECT["entry-points"]}
    text = "".join(f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in of.items()) for group, of in groups.items())
    (info / "entry_points.txt").write_text(text)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = [f"{path.relative_to(folder).as_posix()},sha256=x,{path.stat().st_size}\n" for path in paths]
    (info / "RECORD").write_text("".join([*lines, f"{info.name}/RECORD,,\n"]))
    return Site(folder)


def test_a_whole_installation_says_nothing(site: Site) -> None:
    for done in (
        site.command("--version"),
        site.run("-m", "ppbench", "--version"),
        site.run("-m", "ppbench_fl", "--version"),
    ):
        assert done == Done(0, "ppbench 0.1.0\n", "")


@pytest.mark.parametrize(
    "files",
    all_but_nightly([HARMLESS, RAISING, {**HARMLESS, **COMMANDS}, COMMANDS], [RAISING, {**HARMLESS, **COMMANDS}]),
    ids=["", "raises", "all", "cli"],
)
def test_the_command_says_that_another_distribution_has_overwritten_it_which_and_what_repairs_it(
    site: Site, files: dict[str, str]
) -> None:
    site.install(wheel_of(files))
    done = site.command("list")
    assert done.code == 2 and done.out == "" and done.err.count("\n") == 1, done
    assert (
        "ppbench: The package ppbench of ppbench-fl was overwritten by the distribution ppbench 0.3.0, which"
        in done.err
    )
    assert str(site.folder / next(path for path in sorted(files) if path in OURS)) in done.err
    assert done.err.endswith(f"Repair it: {UNINSTALL} && {AGAIN}\n")


OURS = {"ppbench/__init__.py", "ppbench/commands/__init__.py", "ppbench/__main__.py", "ppbench/run/loop.py"}


def test_so_does_the_module_where_it_is_still_ours(site: Site) -> None:
    site.install(wheel_of(HARMLESS))
    done = site.run("-m", "ppbench", "list")
    assert done.code == 2 and "was overwritten by the distribution ppbench 0.3.0" in done.err and done.out == ""


@pytest.mark.parametrize(
    "files",
    all_but_nightly([HARMLESS, RAISING, {"ppbench/run/loop.py": "\n"}], [HARMLESS, {"ppbench/run/loop.py": "\n"}]),
    ids=["", "raises", "deep"],
)
def test_so_does_pytest(site: Site, files: dict[str, str]) -> None:
    site.install(wheel_of(files))
    (site.folder.parent / "test_it.py").write_text("def test_it(): pass\n")
    done = site.run("-m", "pytest", "-p", "no:cacheprovider", "test_it.py")
    message = done.out + done.err
    assert done.code == 4 and "Traceback" not in message and "1 passed" not in message
    assert (
        "ERROR: ppbench: The package ppbench of ppbench-fl was overwritten by the distribution ppbench 0.3.0" in message
    )


def test_pytest_loads_the_plugin_of_a_whole_installation(site: Site) -> None:
    done = site.run("-m", "pytest", "-p", "no:cacheprovider", "--markers")
    assert done.code == 0 and "@pytest.mark.ppbench(defense, suite='digits-quick'" in done.out
    assert "--ppbench-out=DIR" in site.run("-m", "pytest", "--help").out


def my_defense(name: str) -> bytes:
    """Return the wheel of a plugin that imports a name of ours."""
    entry = "my_defense-1.dist-info/entry_points.txt"
    files = {"my_defense.py": f"from ppbench import {name}\n", entry: "[ppbench.defenses]\nmine = my_defense:Mine\n"}
    return wheel_of(files, "my_defense", "1")


@pytest.mark.nightly
def test_a_plugin_that_lacks_a_name_of_ours_gets_the_sentence_and_no_riddle(site: Site) -> None:
    """Where no command looks first: a program that imports modules of ours."""
    site.install(wheel_of(HARMLESS))
    site.install(my_defense("Defense"))
    done = site.run("-c", "from ppbench.run.loop import load_defense; load_defense('mine')")
    assert (
        "PluginError: The package ppbench of ppbench-fl was overwritten by the distribution ppbench 0.3.0" in done.err
    )


@pytest.mark.nightly
def test_a_plugins_own_import_error_is_told_as_it_is(site: Site) -> None:
    site.install(my_defense("Defence"))
    done = site.command("evaluate", "--defense", "mine")
    assert done.code == 2 and "cannot be imported: ImportError: cannot import name 'Defence' from 'ppbench'" in done.err


def test_the_other_one_may_have_been_there_first_and_must_not_be_uninstalled_alone(site: Site, tmp_path: Path) -> None:
    first = Site(tmp_path / "first")
    first.install(wheel_of(HARMLESS))
    shutil.copytree(site.folder, first.folder, dirs_exist_ok=True)
    assert first.command("--version") == Done(0, "ppbench 0.1.0\n", "")
    first.uninstall("ppbench-0.3.0.dist-info")
    for done in (first.command("list"), first.run("-m", "ppbench", "list")):
        assert done.code == 2 and done.out == "", done
        assert (
            done.err
            == f"ppbench: The installation of ppbench-fl lacks {first.folder}/ppbench/__init__.py; repair it: {AGAIN}\n"
        )
    shutil.copytree(site.folder, first.folder, dirs_exist_ok=True)  # what the command does
    assert first.command("--version").code == 0


def test_any_file_of_ours_that_is_missing_or_another_distributions_is_found(site: Site) -> None:
    (site.folder / "ppbench/run/loop.py").write_text('"""Somebody\'s edit."""\n')
    assert site.command("--version").code == 0, "what nobody installed was edited by hand"
    site.install(wheel_of({"ppbench/run/loop.py": "# another loop\n"}, "looper"))
    done = site.command("--version")
    assert done.code == 2 and "overwritten by the distribution looper 0.3.0" in done.err
    assert f"Repair it: pip uninstall looper && {AGAIN}" in done.err
    site.uninstall("looper-0.3.0.dist-info")
    (site.folder / "ppbench/run/cells.py").unlink()
    assert re.search(r"lacks .*ppbench/run/\w+\.py and 1 more files; repair it: ", site.command("--version").err)


def test_a_package_of_that_name_that_comes_first_on_the_path_is_told_with_its_place(site: Site, tmp_path: Path) -> None:
    """As beside an editable install of ours, which any folder of packages precedes."""
    other = Site(tmp_path / "other")
    other.install(wheel_of(RAISING))
    done = site.command("list", before=other.folder)
    init = other.folder / "ppbench/__init__.py"
    assert done == Done(2, "", (
        f"ppbench: Python imports the package ppbench from {init}, of the distribution ppbench 0.3.0, and not that of "
        f"ppbench-fl in {site.folder}/ppbench; repair it: {UNINSTALL}\n"
    ))  # fmt: skip
    script = tmp_path / "scripts"
    script.mkdir()
    (script / "ppbench.py").write_text("print('my own notes')\n")
    done = site.command("list", before=script)
    assert done.code == 2 and done.out == "" and f"from {script}/ppbench.py and not that of ppbench-fl" in done.err
    assert done.err.endswith("; repair it: rename it, or take its folder off the path\n")


def test_another_copy_of_ours_may_come_first(site: Site, tmp_path: Path) -> None:
    """Whoever works on ppbench runs a checkout in front of what is installed."""
    copy = tmp_path / "copy"
    shutil.copytree(site.folder / "ppbench", copy / "ppbench")
    assert site.command("--version", before=copy) == Done(0, "ppbench 0.1.0\n", "")


def test_two_versions_over_one_another_are_told(site: Site) -> None:
    """As `pip install --target` leaves them without --upgrade: the older code, and the metadata of both."""
    site.install(wheel_of({}, "ppbench_fl", "0.2.0"))
    done = site.command("list")
    assert (
        done.code == 2
        and f"Two versions of ppbench-fl, 0.1.0 and 0.2.0, are installed over one another in {site.folder}" in done.err
    )


def test_metadata_of_another_version_than_the_codes_is_a_warning(site: Site) -> None:
    """As of a checkout that was updated and not installed again, or of an older copy before it on the path."""
    info = site.folder / "ppbench_fl-0.1.0.dist-info" / "METADATA"
    info.write_text(info.read_text().replace("Version: 0.1.0", "Version: 0.0.9"))
    done = site.command("list", "models")
    assert done.code == 0 and "  dlnet " in done.out and done.err.count("warning: ") == 1
    assert f"ppbench-fl is installed as version 0.0.9, and the code in {site.folder}/ppbench is 0.1.0" in done.err


@pytest.mark.parametrize(
    ("noted", "right"),
    [
        pytest.param({"url": "file:///", "dir_info": {}}, "'ppbench-fl @ file:///'", marks=pytest.mark.nightly),
        pytest.param({"url": "file:///no/such/folder", "dir_info": {}}, "ppbench-fl", marks=pytest.mark.nightly),
        ({"url": "file:///my%20code", "dir_info": {"editable": True}}, "-e '/my code'"),
        ({"url": "https://host/x.git", "vcs_info": {"vcs": "git", "commit_id": "ab12"}}, "'ppbench-fl @ git+https://host/x.git@ab12'"),
    ],
)  # fmt: skip
def test_ours_is_installed_again_from_where_it_came(site: Site, noted: dict[str, object], right: str) -> None:
    (site.folder / "ppbench_fl-0.1.0.dist-info" / "direct_url.json").write_text(json.dumps(noted))
    (site.folder / "ppbench/commands/__init__.py").unlink()
    assert site.command("list").err.endswith(f"repair it: pip install --force-reinstall --no-deps {right}\n")
