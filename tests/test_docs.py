"""The documents say what the program does: the reference is made from it, and what they tell people to type parses."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="the documents are not here")
def test_the_reference_of_the_command_line_is_the_programs() -> None:
    spec = importlib.util.spec_from_file_location("make_cli", ROOT / "docs" / "make_cli.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = (ROOT / "docs" / "cli.md").read_text()
    assert found == module.reference(), "docs/cli.md is old; run: python docs/make_cli.py"
