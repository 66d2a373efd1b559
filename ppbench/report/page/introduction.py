"""A short introduction of a defense, with its paper."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ppbench.base.errors import UsageError
from ppbench.base.registry import load, plugins
from ppbench.base.summary import summary

_ARXIV = re.compile(r"arXiv:? ?(\d{4}\.\d{4,5})")


@dataclass(frozen=True)
class Introduction:
    """A defense in a line. words: its own first sentence, "" where it is not installed here; paper: citation, or "";
    link: address of the paper, or "".
    """

    name: str
    words: str
    paper: str
    link: str


def introduction_of(name: str) -> Introduction:
    """Return the introduction of the defense `name`."""
    known = plugins("defenses").get(name)
    if known is None:
        return Introduction(name, "", "", "")
    try:
        paper = str(getattr(load("defenses", name), "paper", ""))
    except UsageError:  # its records stay readable where it cannot be imported
        paper = ""
    match = _ARXIV.search(paper)
    return Introduction(name, summary(known), paper, f"https://arxiv.org/abs/{match[1]}" if match else "")
