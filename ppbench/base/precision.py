"""How float32 is rounded while we compute: as IEEE 754 says, whatever torch is set to in this process.

torch lets NVIDIA's GPUs round the factors of convolutions to TF32, ten bits of mantissa, by default, and on request
those of matrix products, on some CPUs even to bfloat16. `computing` is entered around all that trains, attacks or
predicts; what the process was set to comes back when the last who entered it has left. The settings of cuDNN that
choose its algorithms are set too, so that one seed has one result; autocast is off, the default type is float32.
Products of 16-bit numbers are left as they are: nothing of ours is computed in these.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

OPERATIONS = (
    ("generic", "all"),
    *((backend, operation) for backend in ("cuda", "mkldnn") for operation in ("all", "conv", "rnn", "matmul")),
)
"""Where torch 2.9 and later keep a precision, parents first: where one has none, that of its parent counts."""
AUTOCAST = ("cpu", "cuda", "mps", "xpu")


@dataclass(frozen=True)
class Settings:
    """What a process is set to.

    Attributes:
        operations: the precision of each of `OPERATIONS`, its own; empty in torch before 2.9.
        matmul: of `torch.get_float32_matmul_precision`.
        conv: whether cuDNN may use TF32, by the flag that came before `operations`.
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
"""Whether each who has entered allows TF32; the last decides."""
_process: list[Settings] = []
"""What the process was set to before the first entered; one at most."""


@contextmanager
def computing(tf32: bool | None = None) -> Iterator[None]:
    """Compute the body in IEEE float32, or with `tf32` in TF32 where a GPU has it; also usable as a decorator.

    tf32: None: as who entered before, else False. Settings of torch are a process's, so its other threads have them too
    meanwhile.
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
    """Return whether who entered last allows TF32."""
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


def _ours(tf32: bool) -> Settings:
    """Return what we compute with; numbers on a CPU are never rounded."""
    gpu = "tf32" if tf32 else "ieee"
    operations = {key: gpu if key[0] == "cuda" else "ieee" for key in OPERATIONS} if _has_operations() else {}
    return Settings(operations, "high" if tf32 else "highest", tf32, False, True, torch.float32)


# torch has two interfaces to these settings, and each may refuse to be read where the other says something else. So
# that code of others can read either while we compute, both are set to the same; a process may have set them apart.
def _has_operations() -> bool:
    return hasattr(torch._C, "_set_fp32_precision_setter")


def _settings() -> Settings:
    """Return what this process is set to; `_apply` follows, for reading changes it."""
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
        except RuntimeError:  # it differs from what both operations now say
            conv = False
    cudnn = torch.backends.cudnn
    return Settings(operations, matmul, conv, cudnn.benchmark, cudnn.deterministic, torch.get_default_dtype())


def _apply(settings: Settings) -> None:
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
    """Keep to ourselves that the older interface will go one day: it is there for code of others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
