"""What adapters of frameworks have in common: which versions are known, what ships with one, which plans fit."""

from __future__ import annotations

import multiprocessing
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

from ppbench.base.errors import UsageError, because, closest, shown
from ppbench.base.registry import STOCK_PREFIX

if TYPE_CHECKING:
    from ppbench.federation.plan import Plan

Version = tuple[int, int]


class Shipped(Protocol):
    """A defense that ships with a framework. stock: its name behind "stock/"."""

    stock: ClassVar[str]


S = TypeVar("S", bound=Shipped)


@dataclass(frozen=True)
class Framework:
    """A framework and what ships with it.

    title: its name; distribution: as it is installed; extra: ours; oldest, newest: versions that the tests are run
    with; stock: names behind "stock/" of what ships with it, each with the framework's own for it.
    """

    title: str
    distribution: str
    extra: str
    oldest: Version
    newest: Version
    stock: Mapping[str, tuple[str, ...]]

    @contextmanager
    def importing(self, name: str) -> Iterator[None]:
        """Refuse the defense `name`, imported in the block, for what is not installed or does not fit (UsageError).

        A version newer than the tests know is tried, with a warning: our extras have no upper bound, since one would
        hold back a user's framework. Where the import then fails, the version is what the sentence names.
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
        """Return the installed version; UsageError: there is none, which names the extra."""
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            right = f"pip install 'ppbench-fl[{self.extra}]'"
            raise UsageError(f"The defense {name!r} needs {self.title}; {right}.") from None

    def shipped(self, argument: str, what: str, every: Iterable[type[S]]) -> type[S] | None:
        """Return what ships under "stock/NAME", None where `argument` is no such name; UsageError: there is none.

        NAME: ours or the framework's own. what: it is called, as in "mechanism". every: that the installed version has.
        """
        if not argument.startswith(STOCK_PREFIX):
            return None
        name = argument.removeprefix(STOCK_PREFIX)
        own = next((own for own, theirs in self.stock.items() if name in (own, *theirs)), None)
        if own is None:
            raise UsageError(f"There is no {what} of {self.title} named {shown(argument)}; {self._meant(name)}")
        classes = {one.stock: one for one in every}
        if own not in classes:
            version = metadata.version(self.distribution)
            raise UsageError(f"{self.title} {version} has no {shown(argument)}; install a newer {self.distribution}.")
        return classes[own]

    def no_name(self, argument: str, forms: str) -> UsageError:
        """Return the error for an argument that has none of the `forms` of names behind our prefix."""
        names = [one for own, theirs in self.stock.items() for one in (own, *theirs)]
        close = closest(argument, names, most=1)
        meant = f"did you mean '{self.extra}:{STOCK_PREFIX}{close[0]}'? Else " if close else ""
        return UsageError(f"{shown(argument)} is no name behind {self.extra}:; {meant}give {forms}.")

    def _meant(self, name: str) -> str:
        """Return the end of a sentence: what a misspelt name may stand for, or all names where it is close to none."""
        owners = {one: own for own, theirs in self.stock.items() for one in (own, *theirs)}
        close = dict.fromkeys(owners[one] for one in closest(name, owners))
        words = [f"'{STOCK_PREFIX}{own}' ({' or '.join(self.stock[own])})" for own in close or self.stock]
        return f"did you mean {' or '.join(words)}?" if close else f"known are {', '.join(words)}."


def check_plan(name: str, plan: Plan, sent: str, parallel: bool = True) -> None:
    """Refuse a plan under which one local step of a client would not tell a gradient (UsageError).

    sent: what clients of the defense `name` send, in words; parallel: whether they must train side by side.
    """
    for fits, option, right in (
        (not parallel or plan.schedule == "parallel", "schedule", "parallel: clients train side by side"),
        (plan.local.upload == "delta", "upload", f"delta: clients send {sent}"),
        (plan.local.opt.name == "sgd", "optimizer", "sgd: one step then tells a gradient"),
    ):
        if not fits:
            raise UsageError(f"Defense {name!r} needs --{option} {right}.")
