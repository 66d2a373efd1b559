"""Tutorials can be followed to the letter by somebody with an empty folder, and say what then comes out.

A usual run follows the first section; `--battery=whole` follows all pages to their ends: five minutes of a core.
"""

import re

import pytest
from tutorials import DOCS, blocks, follow, lacking

PAGES = sorted(page.name for page in DOCS.glob("tutorial-*.md") if page.name != "tutorial-flower.md")  # its own test
pytestmark = [pytest.mark.nightly, pytest.mark.skipif(not PAGES, reason="the documents are not here")]


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
