"""Parse command-line words: lists, numbers, assignments."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ppbench.base.errors import UsageError, shown
from ppbench.records.schema import Scalar

_NUMBER = re.compile(r"[+-]?((\d+\.?\d*|\.\d+)(e[+-]?\d+)?|inf|infinity|nan)", re.ASCII | re.IGNORECASE)


def names(text: str | None, option: str = "") -> tuple[str, ...] | None:
    """Return "a, b" as ("a", "b"); None for None. Raises UsageError, with the `option`, where nothing is named."""
    if text is None:
        return None
    parsed = tuple(word.strip() for word in text.split(",") if word.strip())
    if not parsed:
        raise UsageError(
            f"Option {option} {shown(text)} names nothing; give names with commas between, or leave it out."
        )
    return parsed


def sizes(text: str | None, option: str = "--attack-batch") -> tuple[int, ...] | None:
    """Return "1,4" as (1, 4). Raises UsageError: a word is no whole number, or there is none."""
    words = names(text, option)
    if words is None:
        return None
    values = [value for value in map(scalar, words) if isinstance(value, int) and not isinstance(value, bool)]
    if len(values) < len(words):
        raise UsageError(f"Option {option} {shown(text)} cannot be used; give whole numbers, as 1,8.")
    return tuple(values)


def numbers(text: str | None, option: str = "--grid") -> str | tuple[float, ...] | None:
    """Return "0.1,1" as (0.1, 1.0), "quick" and "paper" as they are. Raises UsageError: neither grid nor numbers."""
    if text is None or text in ("quick", "paper"):
        return text
    words = names(text, option) or ()
    values = [
        number for number in map(scalar, words) if isinstance(number, int | float) and not isinstance(number, bool)
    ]
    if len(values) < len(words):
        why = "give quick, paper or numbers, as 0.01,0.1."
        raise UsageError(f"Option {option} {shown(text)} cannot be used; {why}")
    return tuple(float(number) for number in values)


def scalar(text: str) -> Scalar:
    """Return a word as bool, int, float or, failing these, as it is; digits are those of ASCII, without underscores."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if re.fullmatch(r"[+-]?\d{1,300}", text, re.ASCII):  # more digits than a float holds are no number of ours
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text


def assignments(words: Sequence[str]) -> tuple[dict[str, Scalar], dict[str, Scalar]]:
    """Return settings, and options of the model, from name=value words; UsageError for a word of another form."""
    settings: dict[str, Scalar] = {}
    model: dict[str, Scalar] = {}
    for word in words:
        name, equals, value = word.partition("=")
        key = name.strip()
        if not equals or not key.removeprefix("model."):
            raise UsageError(f"Option --set {shown(word)} cannot be used; give name=value, as theta=0.05.")
        target = model if key.startswith("model.") else settings
        target[key.removeprefix("model.")] = scalar(value.strip())
    return settings, model


def resolve_device(text: str) -> str:
    """Return "cuda" or "cpu" for "auto", by what torch finds; other words are returned as they are."""
    if text != "auto":
        return text
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
