"""Plugins for tests and benchmarks of engines: a slow attack, one that kills its worker, a defense that raises.

The folder holds a module and its metadata, so that with it on PYTHONPATH every process finds them by entry point.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch

from ppbench.adversary.attack import Attack, Challenge, Guess, Kind
from ppbench.federation.contract import Defense
from ppbench.federation.view import View


@dataclass(frozen=True)
class Zeros(Attack):
    """Says that every label is 0; with PPBENCH_PLANTED_LOG set, that file tells when."""

    kind: ClassVar[Kind] = "label"
    standard: ClassVar[bool] = False

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        _log("start", view, challenges[0].batch, generator)
        self.act(view, challenges[0].batch)
        _log("end", view, challenges[0].batch, generator)
        return [Guess(y=torch.zeros(len(c.unit) * c.batch, dtype=torch.int64)) for c in challenges]

    def act(self, view: View, batch: int) -> None:
        """Do what is planted."""


@dataclass(frozen=True)
class Slow(Zeros):
    """Sleeps first."""

    name: ClassVar[str] = "planted_slow"

    seconds: float = 0.2

    def act(self, view: View, batch: int) -> None:
        time.sleep(self.seconds)


@dataclass(frozen=True)
class Deadly(Zeros):
    """Kills its process, as a kernel does that runs out of memory; only on batches of `batch` of `defense`, if set."""

    name: ClassVar[str] = "planted_deadly"

    batch: int = 1
    defense: str = ""

    def act(self, view: View, batch: int) -> None:
        if batch == self.batch and self.defense in ("", view.defense.name):
            os.kill(os.getpid(), signal.SIGKILL)


class SoreError(Exception):
    """An error that cannot be sent between processes as it is: it wants two arguments and is rebuilt with one."""

    def __init__(self, where: str, count: int) -> None:
        super().__init__(f"planted in {where} ({count})")


@dataclass(frozen=True)
class Sore(Defense):
    """Raises in training."""

    name: ClassVar[str] = "planted_sore"

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        raise SoreError("training", 7)


def _log(event: str, view: View, batch: int, generator: torch.Generator) -> None:
    path = os.environ.get("PPBENCH_PLANTED_LOG")
    if path:
        who = {"defense": view.defense.name, "parameters": asdict(view.defense), "batch": batch}
        fields = {"event": event, "ns": time.time_ns(), "draws": generator.initial_seed(), **who}
        with open(path, "a", encoding="utf-8") as file:  # one small append: lines of several processes stay whole
            file.write(json.dumps(fields, sort_keys=True) + "\n")
