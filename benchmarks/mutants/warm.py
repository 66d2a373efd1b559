"""A process that has imported what tests need and forks for each call: importing takes longer than most tests.

Reads a line of JSON [options of pytest, seconds], answers with [exit code or null after so many seconds, output].
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from importlib import import_module
from typing import BinaryIO

import pytest

SLOW = (
    *("torch", "torch._dynamo", "torch.func", "torch.fx", "hypothesis.strategies", "pandas", "pydantic"),
    *("scipy.stats", "scipy.optimize", "skimage.metrics", "sklearn.datasets", "sklearn.metrics"),
    *("cryptography.hazmat.primitives.asymmetric.x25519", "safetensors.torch", "matplotlib.figure"),
)


def forked(options: list[str], limit: float) -> tuple[int | None, str]:
    """Run pytest in a child of this process."""
    with tempfile.TemporaryFile() as out:
        child = os.fork()
        if child == 0:
            _child(options, out)
        code = _ended(child, time.monotonic() + limit)
        out.seek(0)
        return code, out.read().decode(errors="replace")


def _child(options: list[str], out: BinaryIO) -> None:
    os.setsid()
    for stream in (1, 2):
        os.dup2(out.fileno(), stream)
    code = 99
    try:
        code = int(pytest.main(options))
    finally:
        sys.stdout.flush()
        os._exit(code)


def _ended(child: int, end: float) -> int | None:
    """Return a child's exit code, None where it was killed for lack of time, with all that it started."""
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


if __name__ == "__main__":
    for name in SLOW:
        import_module(name)
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        print(json.dumps(forked(*json.loads(line))), file=answers, flush=True)
