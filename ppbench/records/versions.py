"""Files that a newer ppbench wrote are told from damaged ones: nobody should delete what an upgrade can read."""

from __future__ import annotations

import json
import re

from ppbench.records.schema import SCHEMA

_VERSION = re.compile(r"\d[\w.+]{0,30}")


def newer(stated: object, known: str, version: object) -> str:
    """Return what to do about a schema with a higher number than `known`, "" where `stated` is no such thing."""
    family, _, number = known.rpartition("/")
    head, _, later = stated.rpartition("/") if isinstance(stated, str) else ("", "", "")
    if head != family or not later.isascii() or not later.isdigit() or int(later[:9]) <= int(number):
        return ""
    told = isinstance(version, str) and _VERSION.fullmatch(version)
    return f"a newer ppbench wrote it: install ppbench{'>=' + str(version) if told else ' in its latest version'}."


def by_newer(data: bytes) -> str:
    """Return what to say of a record that a newer ppbench wrote, "" of one that is damaged. Nothing is deleted."""
    try:
        about = json.loads(data)
        schema, version = about["config"]["schema"], about.get("environment", {}).get("ppbench")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ""
    advice = newer(schema, SCHEMA, version)
    return f"is a record of schema {schema!r}, and this ppbench reads {SCHEMA!r}; {advice}" if advice else ""
