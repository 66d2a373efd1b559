"""Numerical libraries use as many threads as they are told: workers that share cores must not wait for one another."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import scipy.linalg  # noqa: F401 - loads scipy's BLAS
import torch
from threadpoolctl import threadpool_info, threadpool_limits

from ppbench.base.device import one_thread
from ppbench.run.executors.local import _enter


def numbers_of_threads() -> dict[str, int]:
    """Return the threads of torch and of each BLAS of this process, by its file."""
    blas = {lib["filepath"]: lib["num_threads"] for lib in threadpool_info() if lib["user_api"] == "blas"}
    return {"torch": torch.get_num_threads(), **blas}


def test_one_thread_limits_torch_and_every_blas_and_restores_them_after_an_error() -> None:
    with threadpool_limits(2, user_api="blas"):
        before = numbers_of_threads()
        assert len(before) > 1 and 2 in before.values()
        with pytest.raises(ZeroDivisionError), one_thread():
            assert {*numbers_of_threads().values()} == {1}
            raise ZeroDivisionError
        assert numbers_of_threads() == before


def test_a_worker_uses_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    context = multiprocessing.get_context("spawn")
    lines = context.SimpleQueue()
    setup = (lines, multiprocessing.current_process().pid, ())
    with ProcessPoolExecutor(1, context, initializer=_enter, initargs=setup) as pool:
        of_torch, of_libraries = pool.submit(torch.get_num_threads), pool.submit(threadpool_info)
        blas = [one["num_threads"] for one in of_libraries.result(timeout=120) if one["user_api"] == "blas"]
    assert of_torch.result() == 1
    assert len(blas) > 0 and {*blas} == {1}
