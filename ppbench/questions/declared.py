"""Checks of every question's declarations before it is used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ppbench.base.declared import class_faults, word_faults
from ppbench.base.registry import load, plugins
from ppbench.questions.base import Question
from ppbench.records.scores import Score, word_of


def faults(plugin: Any, name: str) -> Iterator[str]:
    """Yield why a class is not the question `name`; after the first fault others may be meaningless."""
    yield from class_faults(plugin, Question, name)
    yield from word_faults(plugin, ("title", "source"))
    if not (isinstance(plugin.score, type) and issubclass(plugin.score, Score)):
        yield f"declares score = {plugin.score!r}; it must be a subclass of ppbench's Score"
    yield from _word_faults(plugin, name)
    for attribute in ("follows", "board"):
        if (other := getattr(plugin, attribute)) and other not in plugins("questions"):
            yield f"declares {attribute} = {other!r}, which is not an installed question"
    if not plugin.figures and plugin.headline is Question.headline:
        yield "declares no figures; name its metrics with their titles, the headline first"
    if plugin.metrics is Question.metrics:
        yield "has no metrics(scores, terms); define it"
    if all(getattr(plugin, ask) is getattr(Question, ask) for ask in ("of_probe", "of_model", "of_audit")):
        yield "has no challenges; define of_probe, of_model or of_audit"
    plugin()  # without arguments: an instance has no state


def _word_faults(plugin: type[Question], name: str) -> Iterator[str]:
    """Yield why records could not identify its scores by their `kind`."""
    word = plugin.score.model_fields["kind"].default
    if not isinstance(word, str) or not word:
        yield "has scores without a word; set kind: Literal['word'] = 'word' in their class"
    installed = plugins("questions")
    for other, installed_plugin in installed.items() if name in installed and not installed[name].ours else ():
        if installed_plugin.ours:
            other_score = load("questions", other).score
            if word_of(other_score) == word and other_score is not plugin.score:
                yield f"has scores of kind {word!r}, which are those of {other!r}; take another word"
