"""Sequences of 16 integers from 0 to 9, by the integer that occurs most; a place is right after rounding."""

from typing import ClassVar

import torch

from ppbench.api import Dataset, Modality, Split, holds


class Sequences(Modality):
    name, noun, inputs, content = "sequence", "sequences", "sequences of integers", "sequences"
    headline, figure, readers = "reconstruction_accuracy", "share of right places", ("reconstruction_accuracy",)
    broken = "sequences come with 90% of their places right"
    networks: ClassVar = {"": "mlp"}

    def rebuilt(self, score):
        return score.accuracy is not None and score.accuracy >= 0.9

    def amount(self, score):
        return -1.0 if score.accuracy is None else score.accuracy

    def is_measured(self, score):
        return score.accuracy is not None

    def accuracy(self, guess, truth):
        return float((guess.round() == truth).double().mean())

    def blind_guess(self, examples):
        return examples.mode(0).values


@holds("sequence")
def integers(argument, *, seed, root):
    """Synthetic sequences, a function of the seed."""
    draws = torch.Generator().manual_seed(seed % 2**32)
    y = torch.arange(300) % 10
    uniform = torch.randint(0, 10, (300, 16), generator=draws)
    x = torch.where(torch.rand(300, 16, generator=draws) < 0.6, y[:, None], uniform).float()
    parts = Split(x[:240], y[:240], 10), Split(x[240:], y[240:], 10)
    return Dataset("integers", *parts, 10, (16,), (0.0, 9.0), "sequence")
