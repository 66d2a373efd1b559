"""Tutorials can be followed to the letter by somebody with an empty folder, and say what then comes out.

A usual run follows the first section; `--battery=whole` follows all pages to their ends: five minutes of a core.
"""

import re
from dataclasses import replace

import pytest
import tutorials
from tutorials import DOCS, Block, blocks, follow, lacking, requoted
from wheelhouse import wheelhouse

PAGES = sorted(page.name for page in DOCS.glob("tutorial-*.md") if page.name != "tutorial-flower.md")  # its own test
pytestmark = pytest.mark.skipif(not PAGES, reason="the documents are not here")


def differences(followed):
    return [part for block, printed in followed for part in lacking(block, printed)]


@pytest.mark.battery  # of no values: for the whole only
@pytest.mark.parametrize("page", PAGES)
def test_a_tutorial_is_followed_from_an_empty_folder(page, tmp_path):
    followed = follow(page, tmp_path)
    assert followed[-1][0].page == page
    advice = f"python tests/tutorials.py {page} writes new figures into the page"
    assert not (wrong := differences(followed)), "\n".join([advice, *wrong])


def test_the_first_section_is_followed_from_an_empty_folder(tmp_path):
    """An environment, ppbench, a package of one's own in it; afterwards nothing is there that was not asked for."""
    followed = follow("tutorial-defense.md", tmp_path, "## 2. ")
    assert [block.text.split()[0] for block, _ in followed] == ["python3", "pip"]
    assert not (wrong := differences(followed)), "\n".join(wrong)
    assert "[my-rounding]" in followed[-1][1] and (tmp_path / "work/venv/bin/pytest").exists()
    packages = {path.stem for path in (tmp_path / "work/venv").rglob("*_stand_in.pth")}
    assert "torch_stand_in" in packages and "ruff_stand_in" not in packages and "mypy_stand_in" not in packages


def test_what_was_not_installed_is_missed(tmp_path, monkeypatch):
    """The stumble that this is for: a command of a package that no line before it installs."""
    page = "```sh\npython3 -m venv venv\n. venv/bin/activate\nppbench --version\n```\n"
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/page.md").write_text(page)
    monkeypatch.setattr(tutorials, "DOCS", tmp_path / "docs")
    monkeypatch.setattr(tutorials, "wheelhouse", lambda folder: folder)
    with pytest.raises(AssertionError, match=r"(?s)page.md:1: exit code 127.*ppbench: command not found"):
        follow("page.md", tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_tutorial_is_typed_in_a_fence(page):
    """What stands elsewhere, or needs several machines, would not be followed."""
    text, every = (DOCS / page).read_text(), blocks(page)
    fenced = sum(len(re.findall(r"^(?:\$ )?(?:ppbench|pip|pytest|python) ", b.text, re.MULTILINE)) for b in every)
    printed = re.findall(r"^ *(?:\$ )?(?:ppbench|pip|pytest|python) (?!is\b)", text, re.MULTILINE)
    assert fenced and len(printed) == fenced
    words = [block.text for block in every if block.language == "console"]
    assert all("ray" in text for text in words) and len(words) <= 2
    assert not [block.place for block in every if block.language in ("python", "toml") and not block.path]


BLOCK = Block("page.md", 1, "sh", "", "ppbench\n", "...\ndp  7.5 dB [6.9, 8.0]\n  in 12.3 s ...\n5 cells\n")


@pytest.mark.parametrize(
    ("printed", "wrong"),
    [
        ("head\n• dp 7.4 dB\n[6.9, 8.1] in 99 s and\nmore, 5 cells", 0),  # wrapped elsewhere, slower, last digits
        ("dp 9.5 dB [6.9, 8.0] in 12.3 s then 5 cells", 1),
        ("dp 7.5 dB [6.9, 8.0] in 12.3 s then 9 cells", 1),
        ("ppdl 7.5 dB [6.9, 8.0] in 12.3 s then 5 cells", 1),
        ("5 cells, then dp 7.5 dB [6.9, 8.0] in 12.3 s", 1),
        ("", 2),
    ],
)
def test_what_a_page_quotes_is_compared_word_for_word_and_in_order(printed, wrong):
    assert len(lacking(BLOCK, printed)) == wrong


def test_new_figures_are_written_among_the_same_words():
    printed = "dp 19.5 dB [16.9, 18.0] in 12.3 s then 9 cells"
    better = replace(BLOCK, quoted=requoted(BLOCK, printed))
    assert better.quoted == "...\ndp  19.5 dB [16.9, 18.0]\n  in 12.3 s ...\n9 cells\n" and not lacking(better, printed)
    assert requoted(BLOCK, "nothing of it") == BLOCK.quoted


def test_stand_ins_require_what_the_project_requires(tmp_path):
    names = {path.name.partition("-")[0] for path in wheelhouse(tmp_path).glob("*.whl")}
    assert {"ppbench_fl", "torch", "dp_accounting", "pytest", "markdown_it_py"} <= names
