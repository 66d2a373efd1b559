"""No tensor on the wrong device: every defense with every attack that applies, on a pretended accelerator."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

from ppbench.base.device import check_device, device_name
from ppbench.base.errors import UsageError
from ppbench.base.registry import load_all, plugins

pytestmark = pytest.mark.nightly

HERE = Path(__file__).parent
DEFENSES, ATTACKS = (
    sorted(name for name, plugin in plugins(group).items() if plugin.ours) for group in ("defenses", "attacks")
)
BLIND = "nothing in the view of"
"""What cells say whose adversary sees no upload, and what follows them: no device has a part in it."""


LINEAR = {"analytic", "imprint", "imprint_quiet"}
"""What needs a linear layer that images, or their features, enter: BAFFLE's network has one."""
KINKED = {"spear"}
"""What needs one with a ReLU behind it: PBPFL's network has it."""


SILENT = {"standalone"}
"""What sends nothing: all its cells are blind."""
UNWIRED = {"fishing"}
"""What needs a network that none of these evaluations has: its parts are those of `imprint`."""


def expected(defense: str) -> set[str]:
    """Return the attacks that must end on a defense: what is built for it, `dlg`; on `none` everything general."""
    built = {name: attack.targets for name, attack in load_all("attacks").items()}
    named = {name for name, targets in built.items() if defense in (targets or ())}
    general = (
        {name for name, targets in built.items() if targets is None} - LINEAR - KINKED - UNWIRED
        if defense == "none"
        else set()
    )
    if defense in SILENT:
        return set()
    wired = {"baffle": LINEAR, "pbpfl": KINKED}.get(defense, set())
    return named | general | {"dlg"} | wired


@pytest.fixture(scope="module")
def outputs(tmp_path_factory, pytestconfig):
    """Return what is told by a process of its own: a backend is taken up before the first backward pass or never."""
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch has no backends of Python's")
    home, battery = tmp_path_factory.mktemp("far"), pytestconfig.getoption("--battery")
    known = {**os.environ, "OMP_NUM_THREADS": "1", "PPBENCH_CACHE": str(home / "cache")}
    command = [sys.executable, "far_evaluation.py", str(home), battery, *DEFENSES]
    ran = subprocess.run(command, capture_output=True, text=True, env=known, cwd=HERE)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout.splitlines()[-1])


def test_the_pretended_accelerator_refuses_what_cuda_refuses_and_nothing_else(outputs):
    itself = outputs["itself"]
    assert [name for name, message in itself["refused"].items() if message is None] == []
    assert itself["refused"]["generator"] == "Expected a 'far' device type for generator but found 'cpu'"
    assert [name for name, right in itself["let through"].items() if not right] == []
    assert itself["kept"] == len(itself["refused"]) - 1  # numpy is refused by torch itself


def test_every_attack_that_applies_ends_with_everything_on_one_device(outputs):
    assert set(ATTACKS) - UNWIRED == set().union(*map(expected, DEFENSES)), "every attack must end somewhere"
    assert outputs["refused"] == []
    assert len(outputs["varied"]) == 14 and not any(line.endswith(" 0") for line in outputs["varied"])
    seen = [cell for cell in outputs["cells"] if BLIND not in (cell["reason"] or "")]
    assert [cell for cell in seen if cell["status"] != "complete"] == []
    for defense in DEFENSES:
        done = {cell["attack"] for cell in seen if cell["defense"] == defense}
        assert done >= expected(defense), (defense, sorted(expected(defense) - done))


def test_a_device_that_torch_does_not_know_or_have_is_refused_in_one_sentence():
    check_device("cpu")
    assert device_name("cpu") == platform.machine()
    for word in ("tpu", "meta", "cuda:77", ""):
        with pytest.raises(UsageError, match="cannot be used") as refused:
            check_device(word)
        assert "\n" not in str(refused.value) and "use 'cpu'" in str(refused.value)
