#!/usr/bin/env bash
# Fetches the wheels that a GPU machine without network lacks (x86-64, Python 3.12, torch there already), and ppbench's own.
#   benchmarks/gpu_wheels.sh FOLDER        # about 10 MB; there: pip install --no-index --no-deps --target SITE FOLDER/*.whl
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: benchmarks/gpu_wheels.sh FOLDER" >&2; exit 2; }
home="$(cd "$(dirname "$0")/.." && pwd)"
python="${PYTHON:-$home/.venv/bin/python}"
core="$("$python" -c 'import importlib.metadata as m; print("==".join(["pydantic", m.version("pydantic")]), "==".join(["pydantic-core", m.version("pydantic-core")]))')"
platforms=(); for glibc in 2_5 2_17 2_24 2_28 2_34; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
# shellcheck disable=SC2086  # two words
"$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none \
  "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux1_x86_64 --dest "$1" \
  $core lpips seaborn annotated-types typing-inspection typing-extensions dp-accounting dm-tree attrs cryptography cffi pycparser py-cpuinfo
"$python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$1" "$home"
du -sh "$1"
