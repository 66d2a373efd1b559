"""The option `--device` of the benchmarks that can run on an accelerator."""

from __future__ import annotations

import pytest
import torch

from ppbench.base.device import check_device


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where both sides of a comparison compute, as torch names it")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """Return the device that was asked for."""
    check_device(request.config.getoption("--device"))
    return torch.device(request.config.getoption("--device"))
