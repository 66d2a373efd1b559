"""Devices that torch can compute on: checks and names.

States, messages and what is computed from them lie on the federation's device; the truth, questions and answers on the
CPU. Every draw is made on the CPU, so that one seed has one result on every device, up to the rounding of float32
kernels, see `precision`.
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch

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
