"""What pip is told: it must never fetch the other package that has our import name, and knows us by another."""

import importlib
import os
import re
import sys
from datetime import date
from functools import cache
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from packaging.requirements import Requirement

from ppbench.base import registry
from ppbench.base.version import __version__

tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OTHER = "ppbench"  # whatever names it here is put together, so that this file may be searched like all others


# -- the other package ------------------------------------------------------------------------------------------------
SUFFIXES = {
    *(".py", ".md", ".toml", ".yml", ".yaml", ".sh", ".txt", ".in", ".cfg", ".j2", ".ipynb", ".cff", ".rst"),
    *("", ".js", ".css"),
}  # fmt: skip
NOT_OURS = re.compile(r"\.(?!ci$|github$)|build$|dist$|vendor$|node_modules$|__pycache__$|.*\.egg-info$")
BARE = rf"(?<![\w./@-]){OTHER}(?![\w./-])"
QUOTED = rf"""["']{OTHER}\s*(?:\[[^\]"']*\])?\s*(?:[=<>!~@;][^"']*)?["']"""
TOOL = re.compile(
    r"\b(?:(?:pip3?|pipx|uv|conda|mamba)\b[^&|;#`<>()\n]{0,80}?(?<![\w-])(?:install|download|wheel|run|add)"
    r"|(?:poetry|pdm|rye|hatch)\s+add|uvx)\b(?P<words>[^&|#`<>()]*)"
)
SAID = re.compile(
    "|".join(
        (
            rf"{BARE}\[\w[\w, -]*\]",  # an extra
            rf"{BARE}\s*(?:[=<>!~]=)\s*\d",  # a version
            rf"\binstall\s+[\"'`]*{BARE}",  # a sentence of a message
            rf"^\s*-\s+[\"']?{BARE}\s*(?:[=<>!~]=.*)?[\"']?\s*$",  # a list in YAML
            rf"^Requires-Dist:\s*{BARE}",
            rf"\bpypi(?:\.org)?/(?:\w+/)*{OTHER}(?![\w-])",  # a page or a badge of the index
        )
    ),
    re.MULTILINE | re.IGNORECASE,
)
NEEDS = re.compile(
    r"\b(?:\w+[._-])?(?:dependencies|requires?|optional-dependencies)\b[\"']?\s*[=:]\s*"
    rf"[\[({{](?:[^\]\"')}}]|\"[^\"\n]*\"|'[^'\n]*')*?{QUOTED}"
)
TABLE = re.compile(r"^\[(?:project\.optional-dependencies|dependency-groups)\]\n(?:(?!\[).*\n?)*", re.MULTILINE)


def fetches(name, text):
    """Return what in the text of a file could make somebody's pip fetch the other package, as found."""
    joined = re.sub(r"\\\n\s*", " ", text)
    results = [match[0] for match in (*SAID.finditer(joined), *NEEDS.finditer(joined))]
    for match in TOOL.finditer(joined):
        words = re.sub(r"""\\n|["',\\]""", " ", match["words"].partition("\n")[0]).split(";")[0].split()
        results += [
            match[0].strip() for word in words if re.fullmatch(rf"{OTHER}(?:[\[=<>!~@].*)?", word, re.IGNORECASE)
        ]
    for table in TABLE.finditer(joined):
        results += re.findall(QUOTED, table[0])
    if Path(name).name.startswith(("requirements", "constraints")):
        results += re.findall(rf"^\s*{BARE}.*$", joined, re.MULTILINE | re.IGNORECASE)
    return results


def files():
    """Yield our text files, as the repository holds them: nothing that a run or a build leaves, nothing of others."""
    for home, folders, names in os.walk(ROOT):
        if "pyvenv.cfg" in names:  # an environment under any name
            folders.clear()
            continue
        folders[:] = [name for name in folders if not NOT_OURS.match(name)]
        yield from (Path(home) / name for name in names if Path(name).suffix in SUFFIXES and name != ".git")


FETCHING = (
    "pip install {}",
    "    .venv/bin/pip install -q --upgrade {}",
    "python -m pip install {} .",
    "pip3 install -e . '{}'",
    "/venv/bin/pip --python .venv/bin/python install --no-deps {}",
    'pip install "{}[ray]"',
    "pip install numpy \\\n    {}==0.1.0",
    "pip install {}; echo done",
    "RUN pip install --no-cache-dir {} && rm -rf /root",
    '"!pip install {}\\n",',
    '    "%pip install -q torch {}\\n"',
    'subprocess.run([sys.executable, "-m", "pip", "install", "{}"])',
    "uv pip install {}",
    "uv add {}",
    "uvx {} list",
    "pipx run {}",
    "conda install -c conda-forge {}",
    "pip download PPBench".replace("PPBench", OTHER.upper()),
    'dependencies = ["{}"]',
    'dependencies = [\n  "torch>=2",  # what it needs\n  "{}>=0.1",\n]',
    '  "dependencies": ["numpy[a]", "{}"]',
    "install_requires=['{}'],",
    'requires = ["setuptools>=77", "{}"]',
    '[project.optional-dependencies]\ntest = ["pytest"]\ndev = ["{}", "ruff"]\n',
    '[dependency-groups]\ndev = ["{}"]\n',
    'dev = ["{}[test]", "ruff"]',
    "additional_dependencies: ['{}']",
    "dependencies:\n  - pip\n  - pip:\n    - {}\n",
    "  - {}>=0.1",
    "needs the package ray; install {}[ray].",
    "install {} 0.1.0 on every node",
    'f"install {}{{version}}"',
    "Requires-Dist: {}",
    "https://pypi.org/project/{}/",
    "![version](https://img.shields.io/pypi/v/{})",
)
HARMLESS = (
    "pip install .",
    "pip install -e '.[test]'",
    "pip install {}-fl",
    "pip install '{}-fl[ray]'",
    "python -m pip install --upgrade {}-fl==0.1.0 .",
    "pip install ./{}",
    "pip install dist/{}_fl-0.1.0-py3-none-any.whl",
    "pip install .                     # in an environment with {}",
    "`pip install .` beside {}",
    "pip install . && {} evaluate --defense spn",
    "pip install . ; {} list",
    "pip uninstall {}",
    'source = ["{}"]',
    'packages = ["{}"]',
    'known-first-party = ["{}"]',
    'dependencies = ["{}-fl"]\nsource = ["{}"]',
    'test = ["pytest"]\n\n[project.scripts]\n{} = "{}.cli:main"',
    "import {}",
    "run: {} sweep digits-quick",
    "- {} list",
    'requires = ["setuptools"]\nname = "{}"',
    "Install it beside {} and look",
    "https://pypi.org/project/{}-fl/",
    "environment = dict({}='0.1.0')",
    "- [{}](docs/README.md)",
)


@pytest.mark.parametrize("line", FETCHING)
def test_what_would_fetch_the_other_package_is_found(line):
    assert fetches("any.md", line.replace("{}", OTHER)), line


@pytest.mark.parametrize("line", HARMLESS)
def test_what_fetches_nothing_or_ours_is_not(line):
    assert not fetches("any.md", line.replace("{}", OTHER)), line


def test_lists_of_requirements_are_known_by_their_files_names():
    for line in (OTHER, f"torch\n{OTHER}>=0.1 ; python_version > '3'"):
        assert fetches("requirements-dev.txt", line) and fetches("docs/requirements.txt", line)
    assert not fetches("requirements.txt", f"{OTHER}-fl\n./{OTHER}\n-e .") and not fetches("notes.txt", OTHER)


def test_nothing_of_ours_makes_pip_fetch_the_other_package():
    every = sorted(files())
    names = {str(path.relative_to(ROOT)) for path in every}
    assert {"README.md", "pyproject.toml", "action.yml", ".ci/run", "examples/my_attack/pyproject.toml"} <= names
    assert {"examples/ci/github-workflow.yml", "ppbench/run/executors/ray.py", "docs/tutorial-defense.md"} <= names
    wrong = [
        f"{path.relative_to(ROOT)}: {value}"
        for path in every
        for value in fetches(path.name, path.read_text(encoding="utf-8", errors="replace"))
    ]
    assert not wrong, f"write {registry.DISTRIBUTION}; {OTHER} is somebody else's on the package index:\n" + "\n".join(
        wrong
    )


# -- bounds -----------------------------------------------------------------------------------------------------------
def test_no_requirement_has_an_upper_bound():
    """A bound downgrades what a user has; what CI needs to have fixed stands in its constraints."""
    every = [*PROJECT["dependencies"], *(one for some in PROJECT["optional-dependencies"].values() for one in some)]
    bounded = [one for one in every if any(s.operator not in (">=", "!=") for s in Requirement(one).specifier)]
    assert every and not bounded


def test_ci_fixes_torch_by_a_constraint_and_runs_the_readmes_commands_as_they_stand():
    lines = [line for line in (ROOT / ".ci/constraints.txt").read_text().splitlines() if not line.startswith("#")]
    fixed = {one.name: str(one.specifier) for one in map(Requirement, lines)}
    assert fixed.keys() == {"torch", "torchvision"} and all(text.startswith("==") for text in fixed.values())
    floors = {one.name: one.specifier for one in map(Requirement, PROJECT["dependencies"])}
    assert all(text.removeprefix("==") in floors[name] for name, text in fixed.items())
    run, readme = ((ROOT / name).read_text() for name in (".ci/run", "README.md"))
    assert 'export PIP_CONSTRAINT="$PWD/.ci/constraints.txt"' in run and "export UV_CONSTRAINT=" in run
    assert "env -u PIP_CONSTRAINT -u UV_CONSTRAINT bash tests/wheel_test.sh" in run, "the newest torch is tried"
    assert ".venv/bin/pip install ." in readme and "constraint" not in readme.lower()


# -- our name ---------------------------------------------------------------------------------------------------------
def test_the_distribution_has_a_name_of_its_own_and_the_command_and_the_import_keep_theirs():
    assert PROJECT["name"] == registry.DISTRIBUTION == "ppbench-fl" and registry.FORMER_DISTRIBUTION == OTHER
    assert (
        PROJECT["scripts"] == {"ppbench": "ppbench_fl:main"} and metadata.version(registry.DISTRIBUTION) == __version__
    )
    for path in (ROOT / "examples").glob("*/pyproject.toml"):
        assert tomllib.loads(path.read_text())["project"]["dependencies"] == [registry.DISTRIBUTION], path


@pytest.fixture
def installed(monkeypatch):
    """Return what pretends that these distributions are installed: names with their attacks' names and places."""

    def pretend(**packages):
        entries = []
        for package, attacks in packages.items():
            dist = SimpleNamespace(name=package.replace("_", "-"))
            for name, place in attacks.items():
                entry = metadata.EntryPoint(name, place, "ppbench.attacks")
                vars(entry).update(dist=dist)
                entries.append(entry)
        monkeypatch.setattr(metadata, "entry_points", lambda group: entries if group == "ppbench.attacks" else [])
        monkeypatch.setattr(registry, "plugins", cache(registry.plugins.__wrapped__))
        return {p.name: (p.target, p.distribution, p.ours) for p in registry.plugins("attacks").values()}

    return pretend


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("turned", [False, True])
def test_an_installation_under_the_former_name_that_stayed_behind_counts_for_nothing(installed, turned):
    """Whoever installed the program before it was renamed has both: pip replaces only what has the same name."""
    both = {"ppbench_fl": {"a": "new:A", "b": "same:B"}, "ppbench": {"a": "old:A", "b": "same:B", "gone": "old:Gone"}}
    result = installed(**dict(reversed(both.items())) if turned else both, other={"own": "own:Own"})
    ours = {"a": ("new:A", "ppbench-fl", True), "b": ("same:B", "ppbench-fl", True)}
    assert result == {**ours, "own": ("own:Own", "other", False)}


def test_a_checkout_that_was_updated_and_not_installed_anew_still_has_its_plugins(installed):
    result = installed(ppbench={"a": "here:A"}, other={"b": "there:B"})
    assert result == {"a": ("here:A", "ppbench-fl", True), "b": ("there:B", "other", False)}


# -- what the package index and those who cite are told ---------------------------------------------------------------
REQUIRED = {"authors", "cff-version", "message", "title"}  # by the schema of CFF 1.2.0; so are the keys that may stand
ALLOWED = REQUIRED | {
    *("abstract", "commit", "contact", "date-released", "doi", "identifiers", "keywords", "license", "license-url"),
    *("preferred-citation", "references", "repository", "repository-artifact", "repository-code", "type", "url"),
    "version",
}  # fmt: skip
ENTITY = {
    *("address", "alias", "city", "country", "date-end", "date-start", "email", "fax", "location", "name", "orcid"),
    *("post-code", "region", "tel", "website"),
}
PERSON = ENTITY - {"name", "location", "date-end", "date-start"} | {
    *("affiliation", "family-names", "given-names", "name-particle", "name-suffix"),
}


def schema_errors(citation):
    """Return what is wrong with the content of a CITATION.cff by the rules of the schema that it can break."""
    if not isinstance(citation, dict):
        return ["it is no mapping"]
    wrong = [f"{key} is missing" for key in sorted(REQUIRED - set(citation))]
    wrong += [f"{key} is no key" for key in sorted(set(citation) - ALLOWED)]
    words = {"title", "message", "abstract", "version", "url", "repository-code", "cff-version", "license"}
    wrong += [f"{key} is no text" for key in sorted(words & set(citation)) if not isinstance(citation[key], str)]
    wrong += [] if citation.get("cff-version") == "1.2.0" else ["cff-version is not 1.2.0"]
    wrong += [] if citation.get("type", "software") in ("software", "dataset") else ["type is neither"]
    authors = citation.get("authors")
    if not isinstance(authors, list) or not authors:
        return [*wrong, "authors are no list"]
    for author in authors:
        known = ENTITY if "name" in author else PERSON
        wrong += [f"an author's {key} is no key" for key in sorted(set(author) - known)]
    keywords = citation.get("keywords", ["x"])
    wrong += [] if keywords and len({*keywords}) == len(keywords) else ["keywords are empty or twice there"]
    released = citation.get("date-released")
    wrong += (
        [] if released is None or isinstance(released, date) or re.fullmatch(r"\d{4}-\d\d-\d\d", released) else ["?"]
    )
    return wrong


def test_the_citation_is_one_and_says_what_the_package_says():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert schema_errors(citation) == []
    assert citation["version"] == __version__ and citation["license"] == PROJECT["license"]
    assert citation["repository-code"] == PROJECT["urls"]["Source"]
    assert citation["url"] == PROJECT["urls"]["Documentation"] and citation["keywords"] == PROJECT["keywords"]
    names = [
        author.get("name") or f"{author['given-names']} {author['family-names']}" for author in citation["authors"]
    ]
    assert names == [author["name"] for author in PROJECT["authors"]]
    for key, value in (("title", None), ("authors", []), ("cff-version", "1.3.0"), ("year", 2026), ("version", 0.1)):
        assert schema_errors({**citation, key: value}), key
    assert schema_errors({key: value for key, value in citation.items() if key != "message"}) == ["message is missing"]
    assert schema_errors({**citation, "authors": [{"name": "x", "family-names": "y"}]}) and schema_errors([]) == [
        "it is no mapping"
    ]


def test_the_index_is_told_where_everything_is():
    urls = PROJECT["urls"]
    assert set(urls) == {"Homepage", "Documentation", "Source", "Changelog", "Issues"}
    owner, name = re.fullmatch(r"https://github\.com/([\w-]+)/([\w-]+)", urls["Source"]).groups()
    assert name == PROJECT["name"] and urls["Documentation"] == f"https://{owner}.github.io/{name}/"
    assert all(url.startswith(urls["Source"]) for key, url in urls.items() if key != "Documentation")
    file = urls["Changelog"].rpartition("/blob/main/")[2]
    assert (ROOT / file).is_file(), "the link to the changelog leads to a file of the repository"
    assert (
        len(PROJECT["classifiers"]) == len({*PROJECT["classifiers"]}) > 5
        and "Typing :: Typed" in PROJECT["classifiers"]
    )
    assert not [word for word in PROJECT["classifiers"] if word.startswith("License ::")], "`license` says it, PEP 639"
