"""What adapters of frameworks have in common: which versions are known, what ships with one, which plans fit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

from ppbench.base.errors import UsageError, unknown
from ppbench.base.registry import STOCK

if TYPE_CHECKING:
    from ppbench.federation.plan import Plan

Version = tuple[int, int]


class Shipped(Protocol):
    """A defense that ships with a framework. stock: its name behind "stock/"."""

    stock: ClassVar[str]


S = TypeVar("S", bound=Shipped)


@dataclass(frozen=True)
class Framework:
    """title: its name; distribution: as it is installed; extra: ours; oldest, newest: that the tests are run with."""

    title: str
    distribution: str
    extra: str
    oldest: Version
    newest: Version

    def check_version(self, name: str) -> None:
        """Refuse the defense `name` (UsageError): nothing is installed, or another version than is known here."""
        try:
            found = metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            right = f"pip install 'ppbench-fl[{self.extra}]'"
            raise UsageError(f"The defense {name!r} needs {self.title}; {right}.") from None
        here = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
        if not self.oldest <= here <= self.newest:
            low, high = (".".join(map(str, end)) for end in (self.oldest, self.newest))
            right = f"is known to work with {self.title} {low} to {high}"
            raise UsageError(f"The defense {name!r} {right}; {found} is installed.")

    def shipped(self, argument: str, what: str, every: Iterable[type[S]]) -> type[S] | None:
        """Return what ships under "stock/NAME", None where `argument` is no such name; UsageError: there is none.

        what: it is called, as in "mechanism".
        """
        if not argument.startswith(STOCK):
            return None
        known = {STOCK + one.stock: one for one in every}
        if argument not in known:
            raise unknown(f"{what} of {self.title}", argument, known)
        return known[argument]


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
