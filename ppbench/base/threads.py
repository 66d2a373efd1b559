"""Threads of the numerical libraries: of torch, and of the BLAS of numpy and scipy.

Jobs run beside one another, one per core. With more threads each they would wait for one another: on two cores the
default evaluation took a quarter longer. The number of threads may also change the last bits of a sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from threadpoolctl import threadpool_limits


def set_threads(count: int) -> None:
    """Let torch, numpy and scipy use `count` threads in this process from now on."""
    import scipy.linalg  # noqa: F401 - a BLAS that is loaded later would not be limited

    torch.set_num_threads(count)
    threadpool_limits(count, user_api="blas")


@contextmanager
def one_thread() -> Iterator[None]:
    """Run the body with one thread, and restore the numbers of threads."""
    import scipy.linalg  # noqa: F401 - see `set_threads`

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(before)
