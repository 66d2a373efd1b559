"""What README.md quotes is made by a command, and another run is told from the quoted one."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def made(script):
    return script(ROOT / "docs" / "readme.py")


def test_figures_may_differ_as_processors_do_and_words_may_not(made):
    quoted = "$ ppbench\nspn falls: images rebuilt at 46 dB (undefended 100)\n────\nalpha2=0.1  96.4% (-0.6)"
    assert not made.drifted(quoted, quoted.replace("46 dB", "47 dB").replace("────", "──────"))
    assert made.drifted(quoted, quoted.replace("46 dB", "39 dB"))
    assert made.drifted(quoted, quoted.replace("falls", "stands"))
    assert made.drifted(quoted, quoted + " 3")


def test_readme_quotes_a_run_of_the_command_that_it_names(made):
    text = made.README.read_text(encoding="utf-8")
    assert made.PLACE.search(text) and f"$ {' '.join(made.COMMAND)}\n" in text and made.PICTURE.is_file()
    assert "docs/images/strip.png" in text and len(text.splitlines()) <= 90
