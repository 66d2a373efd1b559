"""`benchmarks/gpu.sh`: it refuses a machine without a GPU in one sentence, and keeps its time on any."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_parts", BENCHMARKS / "gpu.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_without_a_gpu_it_says_so_in_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    subprocess.run(["bash", "-n", str(BENCHMARKS / "gpu.sh")], check=True)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    command = ["bash", str(BENCHMARKS / "gpu.sh"), "--out", str(tmp_path / "found")]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ran.returncode == 2 and ran.stdout == ""
    assert ran.stderr == "Device 'cuda' was asked for, but torch finds no GPU; use --device cpu or auto.\n"
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_does_not_fit_is_stopped_with_its_children_and_said(gpu: ModuleType, tmp_path: Path) -> None:
    child = "import subprocess; print('begun', flush=True); subprocess.run(['sleep', '60'])"
    long = gpu.run(gpu.Part("long", 1, ["-c", child]), 2, tmp_path)
    assert long.code is None and long.seconds < gpu.GRACE_S and long.word.startswith("did not fit")
    short = gpu.run(gpu.Part("short", 1, ["-c", "print('an end')"]), 60, tmp_path)
    broken = gpu.run(gpu.Part("broken", 1, ["-c", "raise SystemExit(3)"]), 60, tmp_path)
    assert (short.word, broken.word) == ("done", "FAILED with exit status 3")
    text = gpu.page({"device": "a"}, [long, short, broken], tmp_path)
    assert "| short | 0 | done | an end |" in text and "| long | 2 | did not fit: stopped after 2 s |" in text


def test_the_page_counts_cells_and_the_archive_holds_records_without_caches(gpu: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "found"
    (out / "suite" / "records").mkdir(parents=True)
    (out / "suite" / "cache").mkdir()
    (out / "suite" / "cache" / "state.safetensors").write_bytes(b"0")
    for place, (status, reason) in enumerate(
        [("complete", None), ("failed", "two devices"), ("failed", "two devices")]
    ):
        (out / "suite" / "records" / f"{place}.json").write_text(json.dumps({"status": status, "reason": reason}))
    (out / "bench_a.json").write_text(json.dumps({"benchmarks": [{"name": "t", "extra_info": {"ratio": 2.5}}]}))
    (out / "bench_b.json").write_text("")
    text = gpu.page({}, [], out)
    assert "- 1 cells complete\n- 2 cells failed\n- 2 failed: two devices" in text
    assert "- t: ratio 2.5" in text and "No figure: the part was cut short." in text
    inside = zipfile.ZipFile(gpu.archive(out)).namelist()
    assert "found/suite/records/0.json" in inside and not any("cache" in name for name in inside)


def test_all_parts_together_take_all_the_time(gpu: ModuleType, tmp_path: Path) -> None:
    parts = gpu.parts("cuda", tmp_path, None)
    assert sum(part.share for part in parts) == pytest.approx(1, abs=0.05)
    assert len({part.name for part in parts}) == len(parts)
    assert all("cuda" in part.command for part in parts if part.name != "tests")
