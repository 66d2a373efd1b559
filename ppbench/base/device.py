"""Devices that torch can compute on: whether a word names one, and what the machine calls it.

States, messages and what is computed from them lie on the federation's device; the truth, questions and answers on the
CPU. Every draw is made on the CPU, so that one seed has one result on every device, to the rounding of its kernels:
that of float32, see `precision`.
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch

from ppbench.base.errors import UsageError, because, shown
from ppbench.base.machine import memory


def check_device(word: str) -> None:
    """Refuse a device, as torch names it, that torch cannot compute on here (UsageError)."""
    right = "'cpu' or 'cuda'" if torch.cuda.is_available() else "'cpu'"
    if word == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"Device 'cuda' was asked for, but torch finds no GPU; use {right}.")
    try:
        torch.ones(1, device=word).item()
    except (RuntimeError, AssertionError, ValueError, NotImplementedError) as cause:  # torch raises any of them
        raise UsageError(f"Device {shown(word)} cannot be used ({because(cause)}); use {right}.") from cause


def device_name(word: str | torch.device) -> str:
    """Return what computes on a device: the GPU's name, the CPU's architecture, or the word itself."""
    device = torch.device(word)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.machine() if device.type == "cpu" else str(device)


def memory_of(device: torch.device) -> float:
    """Return the bytes of memory that a device has: a GPU's own, else this process's."""
    return float(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else memory()


@cache
def processor() -> str:
    """Return what this machine's processor is called, and which of its instructions torch uses.

    Two that differ may round a sum otherwise, in its last bits.
    """
    name = ""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    except OSError:  # another system
        name = platform.processor()
    return f"{name or platform.machine()} ({torch.backends.cpu.get_cpu_capability()})"
