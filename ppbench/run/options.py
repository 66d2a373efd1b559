"""What command-line words mean: lists, numbers, assignments."""

from __future__ import annotations

from collections.abc import Sequence

from ppbench.base.errors import UsageError
from ppbench.records.schema import Scalar


def names(text: str | None) -> tuple[str, ...] | None:
    """Return "a, b" as ("a", "b"); None for None."""
    return None if text is None else tuple(word.strip() for word in text.split(",") if word.strip())


def sizes(text: str | None) -> tuple[int, ...] | None:
    """Return "1,4" as (1, 4). Raises UsageError: a word is no whole number."""
    try:
        return None if text is None else tuple(map(int, names(text) or ()))
    except ValueError as cause:
        raise UsageError(f"Option --attack-batch {text!r} cannot be used; give whole numbers, as 1,8.") from cause


def numbers(text: str | None) -> str | tuple[float, ...] | None:
    """Return "0.1,1" as (0.1, 1.0), "quick" and "paper" as they are. Raises UsageError: neither grid nor numbers."""
    try:
        return text if text in (None, "quick", "paper") else tuple(map(float, names(text) or ()))
    except ValueError as cause:
        why = "give quick, paper or numbers, as 0.01,0.1."
        raise UsageError(f"Option --grid {text!r} cannot be used; {why}") from cause


def scalar(text: str) -> Scalar:
    """Return a word as bool, int, float or, failing these, as it is."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def assignments(words: Sequence[str]) -> tuple[dict[str, Scalar], dict[str, Scalar]]:
    """Return settings, and options of the model, from name=value words; UsageError for a word of another form."""
    settings: dict[str, Scalar] = {}
    model: dict[str, Scalar] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"Option --set {word!r} cannot be used; give name=value, as theta=0.05.")
        target = model if name.strip().startswith("model.") else settings
        target[name.strip().removeprefix("model.")] = scalar(value.strip())
    return settings, model


def resolve_device(text: str) -> str:
    """Return "cuda" or "cpu" for "auto", by what torch finds; other words are returned as they are."""
    if text != "auto":
        return text
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
