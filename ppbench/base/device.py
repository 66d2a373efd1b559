"""Devices that torch can compute on: checks, names and threads.

States, messages and what is computed from them lie on the federation's device; the truth, questions and answers on the
CPU. Every draw is made on the CPU, so that one seed has one result on every device, up to the rounding of float32
kernels, see `precision`.
"""

from __future__ import annotations

import platform
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from threadpoolctl import threadpool_limits

from ppbench.base.errors import UsageError, because, shown
from ppbench.base.machine import memory


def check_device(word: str) -> None:
    """Raise UsageError if torch cannot compute on the device `word` here."""
    advice = "'cpu' or 'cuda'" if torch.cuda.is_available() else "'cpu'"
    if word == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"Device 'cuda' was asked for, but torch finds no GPU; use {advice}.")
    try:
        torch.ones(1, device=word).item()
    except (RuntimeError, AssertionError, ValueError, NotImplementedError) as cause:  # torch raises any of them
        raise UsageError(f"Device {shown(word)} cannot be used ({because(cause)}); use {advice}.") from cause


def device_name(word: str | torch.device) -> str:
    """Return the GPU's name, the CPU's architecture, or for other devices torch's own name."""
    device = torch.device(word)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.machine() if device.type == "cpu" else str(device)


def memory_of(device: torch.device) -> float:
    """Return the memory of a device in bytes: a GPU's own, else what this process may use."""
    return float(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else memory()


@cache
def processor() -> str:
    """Return the name of this machine's processor and the instruction set that torch uses on it.

    Processors that differ in either may round the last bits of a sum differently.
    """
    name = ""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    except OSError:  # another system
        name = platform.processor()
    return f"{name or platform.machine()} ({torch.backends.cpu.get_cpu_capability()})"


# -- Rounding of float32: IEEE 754 while ppbench computes, whatever torch is set to in this process --
# By default torch lets NVIDIA's GPUs round the factors of convolutions to TF32, ten bits of mantissa, and on request
# those of matrix products, on some CPUs even to bfloat16. `computing` wraps all that trains, attacks or predicts;
# the settings of the process are restored when the last `computing` block ends. cuDNN's choice of algorithms is
# fixed too, so that one seed has one result; autocast is off, the default type is float32. Products of 16-bit
# numbers are left as they are: ppbench computes none.

OPERATIONS = (
    ("generic", "all"),
    *((backend, operation) for backend in ("cuda", "mkldnn") for operation in ("all", "conv", "rnn", "matmul")),
)
"""Operations for which torch 2.9 and later keep a precision, parents first; an unset one inherits its parent's."""
AUTOCAST = ("cpu", "cuda", "mps", "xpu")


@dataclass(frozen=True)
class FloatSettings:
    """Numerical settings of a process.

    Attributes:
        operations: the precision of each of `OPERATIONS`, not inherited; empty in torch before 2.9.
        matmul: the value of `torch.get_float32_matmul_precision`.
        conv: whether cuDNN may use TF32, by the flag that preceded `operations`.
        benchmark, deterministic: how cuDNN chooses algorithms.
        dtype: the default type.
    """

    operations: Mapping[tuple[str, str], str]
    matmul: str
    conv: bool
    benchmark: bool
    deterministic: bool
    dtype: torch.dtype


_lock = threading.Lock()
_entered: list[bool] = []
"""Whether TF32 is allowed, for each `computing` block that is open; the last one counts."""
_process: list[FloatSettings] = []
"""The settings of the process before the first `computing` block; one at most."""


@contextmanager
def computing(tf32: bool | None = None) -> Iterator[None]:
    """Compute the body in IEEE float32, or with `tf32` in TF32 where a GPU has it; also usable as a decorator.

    tf32: None: as in the enclosing block, else False. The settings hold for the whole process, other threads included.
    """
    mode = _enter(tf32)
    casts = [kind for kind in AUTOCAST if torch.is_autocast_enabled(kind)]
    for kind in casts:
        torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        for kind in casts:
            torch.set_autocast_enabled(kind, True)
        _leave(mode)


def tf32_allowed() -> bool:
    """Return whether the innermost `computing` block allows TF32."""
    return bool(_entered) and _entered[-1]


def _enter(tf32: bool | None) -> bool:
    with _lock:
        mode = tf32_allowed() if tf32 is None else tf32
        if not _entered:
            _process.append(_settings())
        if not _entered or _entered[-1] != mode:
            _apply(_ours(mode))
        _entered.append(mode)
    return mode


def _leave(mode: bool) -> None:
    with _lock:
        last = _entered[-1]
        del _entered[len(_entered) - 1 - _entered[::-1].index(mode)]
        if not _entered:
            _apply(_process.pop())
        elif _entered[-1] != last:
            _apply(_ours(_entered[-1]))


def _ours(tf32: bool) -> FloatSettings:
    """Return ppbench's settings; TF32 is allowed on GPUs only."""
    gpu = "tf32" if tf32 else "ieee"
    operations = {key: gpu if key[0] == "cuda" else "ieee" for key in OPERATIONS} if _has_operations() else {}
    return FloatSettings(operations, "high" if tf32 else "highest", tf32, False, True, torch.float32)


# torch has two interfaces to these settings, and each may refuse to be read if the other differs. Both are set to the
# same values, so that other code can read either while we compute; a process may have set them to different values.
def _has_operations() -> bool:
    return hasattr(torch._C, "_set_fp32_precision_setter")


def _settings() -> FloatSettings:
    """Return the settings of this process; reading changes them, so `_apply` must follow."""
    operations = dict[tuple[str, str], str]()
    for key in OPERATIONS if _has_operations() else ():
        operations[key] = torch._C._get_fp32_precision_getter(*key)  # with its parents unset it is its own
        torch._C._set_fp32_precision_setter(*key, "none")
    with _quiet():
        matmul = torch.get_float32_matmul_precision()
        for key in (("cuda", "conv"), ("cuda", "rnn")) if operations else ():
            torch._C._set_fp32_precision_setter(*key, "tf32")
        try:
            conv = torch.backends.cudnn.allow_tf32
        except RuntimeError:  # it differs from the two operations set above
            conv = False
    cudnn = torch.backends.cudnn
    return FloatSettings(operations, matmul, conv, cudnn.benchmark, cudnn.deterministic, torch.get_default_dtype())


def _apply(settings: FloatSettings) -> None:
    with _quiet():
        torch.backends.cudnn.allow_tf32 = settings.conv
        torch.set_float32_matmul_precision(settings.matmul)
    for key, value in settings.operations.items():  # last: the older interface sets some of them
        torch._C._set_fp32_precision_setter(*key, value)
    torch.backends.cudnn.benchmark = settings.benchmark
    torch.backends.cudnn.deterministic = settings.deterministic
    torch.set_default_dtype(settings.dtype)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the deprecation warnings of the older interface, which is set for other code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# -- Threads of the numerical libraries: of torch, and of the BLAS of numpy and scipy --
# Jobs run beside one another, one per core. With more threads each they would wait for one another: on two cores the
# default evaluation took a quarter longer. The number of threads may also change the last bits of a sum.


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
