"""What could not be read while a page was made: it is said on the page and to the caller, and the rest is shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ppbench.base.errors import UsageError
from ppbench.records.schema import Record

T = TypeVar("T")


class Problems:
    """Sentences on what could not be read, each once, in the order in which it was tried.

    found: the sentences so far; they hold paths and other people's values, so a page must escape them.
    """

    def __init__(self, found: Sequence[str] = ()) -> None:
        """Begin with what is known already."""
        self.found = list(found)

    def past(self, read: Callable[[Record], T | None]) -> Callable[[Record], T | None]:
        """Return `read`, which gives None instead of raising UsageError; the error's sentence is kept."""

        def tolerant(record: Record) -> T | None:
            try:
                return read(record)
            except UsageError as error:
                if str(error) not in self.found:
                    self.found.append(str(error))
                return None

        return tolerant
