"""Runs a framework's code in this process: seeded, quiet, with its errors as ours."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import numpy as np
import torch

from ppbench.base.errors import ProtocolError, UsageError
from ppbench.base.guard import error_text, within
from ppbench.federation.contract import Defense
from ppbench.federation.plan import Context


@contextmanager
def seeded_run(framework: str, who: str, *seed: int) -> Iterator[None]:
    """Run code with the global generators of Python, NumPy and torch seeded; restore their states afterwards.

    Mechanisms draw from them. framework: its top package, of whose log only errors pass; who: for the error.
    ProtocolError: the code raises anything.
    """
    state = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    log, level = logging.getLogger(framework), logging.getLogger(framework).level
    words = np.random.SeedSequence(seed).generate_state(4)
    log.setLevel(logging.ERROR)
    random.seed(int(words[0]))
    np.random.seed(words[:3])
    torch.default_generator.manual_seed(int(words[3]))
    try:
        yield
    except (ProtocolError, UsageError):
        raise
    except BaseException as cause:
        # What Flower raises to end an app is no Exception in its older versions.
        if isinstance(cause, Exception) or within(type(cause).__module__, framework):
            raise ProtocolError(f"{who} raised {error_text(cause)}.") from cause
        raise
    finally:
        log.setLevel(level)
        random.setstate(state[0])
        np.random.set_state(state[1])
        torch.random.set_rng_state(state[2])


def context_seed(ctx: Context) -> int:
    """Return the seed of a party's draws in this step: from its generator's seed, not its position, and the session."""
    return int.from_bytes(hashlib.sha256(f"{ctx.generator.initial_seed()} {ctx.session}".encode()).digest()[:8], "big")


def description(defense: Defense) -> str:
    """Return a defense and its parameters in words, for errors that its code raises."""
    parameters = ", ".join(f"{name}={value}" for name, value in asdict(defense).items()) or "no parameters"
    return f"Defense {defense.name!r}, made of {parameters},"


@contextmanager
def as_usage_error() -> Iterator[None]:
    """Turn a ProtocolError into a UsageError: before a run starts, bad input is its cause."""
    try:
        yield
    except ProtocolError as cause:
        raise UsageError(str(cause)) from cause
