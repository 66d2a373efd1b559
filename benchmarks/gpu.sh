#!/usr/bin/env bash
# Everything that needs a GPU, in one command of at most 25 minutes: tests, figures, large suites; one archive of records, one page.
#   benchmarks/gpu.sh [--minutes 25] [--out gpu-results] [--data FOLDER]
#   benchmarks/gpu.sh --device cpu --minutes 2      tries the same parts, cut short, on a machine without a GPU
# Exit 0: every part ended or was cut at its time; 1: a part failed, the page says which; 2: there is no GPU, or a wrong option.
set -euo pipefail
home="$(cd "$(dirname "$0")/.." && pwd)"
python="${PYTHON:-$home/.venv/bin/python}"
[ -x "$(command -v "$python")" ] || { echo "benchmarks/gpu.sh needs a Python with ppbench; set PYTHON." >&2; exit 2; }
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$python" "$home/benchmarks/gpu.py" "$@"
