"""What a job raised, as it travels between processes."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from ppbench.base.errors import Overflow, ProtocolError, Unwritable, UsageError
from ppbench.run.audit.runs import Refused
from ppbench.run.jobs import Job, Tell, work


@dataclass(frozen=True)
class Failure:
    """What a job raised, in words: an exception of a plugin's own may not survive the way between two processes.

    Attributes:
        name: of the exception's class.
        text: its message.
        trace: its traceback.
    """

    name: str
    text: str
    trace: str

    def revived(self) -> Exception:
        """Return an exception of the same name and message, one of ppbench's own as itself."""
        ours = {cls.__name__: cls for cls in (UsageError, Unwritable, Refused, ProtocolError, Overflow)}
        error: Exception = ours.get(self.name, type(self.name, (Exception,), {}))(self.text)
        error.__cause__ = Exception(f"\n{self.trace}")
        return error


def attempt(job: Job, tell: Tell | None = None) -> Failure | None:
    """Do a job as `work` does; return what it raised."""
    try:
        work(job, tell)
    except Exception as cause:  # noqa: BLE001 - a stranger's code may raise anything; the scheduler decides
        return Failure(type(cause).__name__, str(cause), traceback.format_exc())
    return None
