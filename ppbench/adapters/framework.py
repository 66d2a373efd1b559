"""What the adapters of frameworks share: supported versions, defenses that ship with a framework, plans that fit."""

from __future__ import annotations

import multiprocessing
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, TypeVar

from ppbench.base.errors import UsageError, because, closest, shown
from ppbench.base.registry import STOCK_PREFIX

if TYPE_CHECKING:
    from ppbench.federation.contract import Defense
    from ppbench.federation.plan import Plan

Version = tuple[int, int]
Grids = Mapping[str, tuple[float, ...]]
"""Values of a control parameter, by preset."""


ShippedDefense = TypeVar("ShippedDefense", bound="Defense")


@dataclass(frozen=True)
class Framework:
    """A framework and the defenses that ship with it.

    title: its name; distribution: its package on PyPI; extra: the extra of ppbench-fl that installs it; oldest, newest:
    the versions that the tests are run with; stock: our names behind "stock/", each with the framework's own names.
    """

    title: str
    distribution: str
    extra: str
    oldest: Version
    newest: Version
    stock: Mapping[str, tuple[str, ...]]

    @contextmanager
    def importing(self, name: str) -> Iterator[None]:
        """Import the defense `name` in the block; UsageError: the framework is missing, too old, or too new to import.

        A version newer than the tested ones is tried, with a warning: our extras have no upper bound, since one would
        hold back a user's framework. If the import then fails, the error names the version.
        """
        installed = self._installed(name)
        release = tuple(int(digits) for digits in re.findall(r"\d+", installed)[:2])
        low, high = (".".join(map(str, end)) for end in (self.oldest, self.newest))
        if release < self.oldest:
            raise UsageError(f"The defense {name!r} needs {self.title} {low} or newer; {installed} is installed.")
        newer = release > self.newest
        if newer and multiprocessing.parent_process() is None:  # workers need not repeat it
            about = f"{self.title} {installed} is newer than {high}, the newest that {name!r} was tested with"
            warnings.warn(f"{about}: its figures are untested.", stacklevel=3)
        try:
            yield
        except Exception as cause:
            if not newer or isinstance(cause, UsageError):
                raise
            trouble = f"does not run with {self.title} {installed} ({type(cause).__name__}: {because(cause)})"
            right = f"pip install '{self.distribution}=={high}.*'"
            raise UsageError(f"The defense {name!r} {trouble}, which is newer than {high}; {right}.") from cause

    def _installed(self, name: str) -> str:
        """Return the installed version; UsageError, which names the extra: the framework is not installed."""
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            right = f"pip install 'ppbench-fl[{self.extra}]'"
            raise UsageError(f"The defense {name!r} needs {self.title}; {right}.") from None

    def shipped(
        self, argument: str, noun: str, available: Iterable[type[ShippedDefense]]
    ) -> type[ShippedDefense] | None:
        """Return the class that ships as "stock/NAME", None if `argument` has another form; UsageError: unknown NAME.

        NAME: ours or the framework's own. noun: for the error, as "mechanism". available: in the installed version.
        """
        if not argument.startswith(STOCK_PREFIX):
            return None
        name = argument.removeprefix(STOCK_PREFIX)
        own = next((own for own, theirs in self.stock.items() if name in (own, *theirs)), None)
        if own is None:
            raise UsageError(f"There is no {noun} of {self.title} named {shown(argument)}; {self._meant(name)}")
        shipped = next((cls for cls in available if cls.name == f"{self.extra}:{STOCK_PREFIX}{own}"), None)
        if shipped is None:
            version = metadata.version(self.distribution)
            raise UsageError(f"{self.title} {version} has no {shown(argument)}; install a newer {self.distribution}.")
        return shipped

    def no_name(self, argument: str, forms: str) -> UsageError:
        """Return the error for an argument that has none of the accepted `forms`."""
        names = [known_name for own, theirs in self.stock.items() for known_name in (own, *theirs)]
        close = closest(argument, names, most=1)
        meant = f"did you mean '{self.extra}:{STOCK_PREFIX}{close[0]}'? Else " if close else ""
        return UsageError(f"{shown(argument)} is no name behind {self.extra}:; {meant}give {forms}.")

    def _meant(self, name: str) -> str:
        """Return the end of an error: the names that are close to a misspelt one, or all names if none is."""
        owners = {one: own for own, theirs in self.stock.items() for one in (own, *theirs)}
        close = dict.fromkeys(owners[one] for one in closest(name, owners))
        words = [f"'{STOCK_PREFIX}{own}' ({' or '.join(self.stock[own])})" for own in close or self.stock]
        return f"did you mean {' or '.join(words)}?" if close else f"known are {', '.join(words)}."


def check_plan(name: str, plan: Plan, sent: str, parallel: bool = True) -> None:
    """Raise UsageError unless a client's upload after one local step reveals a gradient under `plan`.

    sent: what clients of the defense `name` send, in words; parallel: whether clients must train in parallel.
    """
    for fits, option, right in (
        (not parallel or plan.schedule == "parallel", "schedule", "parallel: clients train side by side"),
        (plan.local.upload == "delta", "upload", f"delta: clients send {sent}"),
        (plan.local.opt.name == "sgd", "optimizer", "sgd: one step then tells a gradient"),
    ):
        if not fits:
            raise UsageError(f"Defense {name!r} needs --{option} {right}.")
