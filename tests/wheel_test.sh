#!/usr/bin/env bash
# Install a wheel into an empty environment and use it from a folder that has its own attacks/ and defenses/.
# With no constraints it is also the smoke test of the newest torch: pip takes the newest of everything, as for a user.
# Usage: tests/wheel_test.sh PYTHON   (PYTHON has the package `build`)
set -euo pipefail
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m build -q --outdir "$work/dist" "$root"
"$python" - "$work/dist" <<'PY'
import sys, tarfile, zipfile
from pathlib import Path

folder = Path(sys.argv[1])
wheel = zipfile.ZipFile(next(folder.glob("*.whl"))).namelist()
sdist = tarfile.open(next(folder.glob("*.tar.gz"))).getnames()
assert next(folder.glob("*.whl")).name.startswith("ppbench_fl-"), "ppbench is somebody else's distribution"
need = ["ppbench_fl.py", "ppbench/defenses/spn.py", "ppbench/attacks/adaptive/spn.py", "ppbench/py.typed"]
need += ["ppbench/suites/digits-quick.toml", "ppbench/claims/papers/fan2020.toml", "ppbench/report/page/vendor/SHA256SUMS"]
missing = [name for name in need if name not in wheel]
assert not missing, f"the wheel lacks {missing}"
assert not [n for n in wheel if n.split("/")[0] in ("tests", "attacks", "defenses", "leaderboards")], "stray top level"
for part in ("leaderboards/", "tests/", "docs/", "action.yml", "CITATION.cff"):
    assert any(f"/{part}" in name for name in sdist), f"the sdist lacks {part}"
PY

python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q "$work"/dist/*.whl
"$work/venv/bin/python" -c 'import sys; from importlib.metadata import version as v; print("with", *(f"{n} {v(n)}" for n in sys.argv[1:]))' \
  torch torchvision numpy
mkdir -p "$work/mine/attacks" "$work/mine/defenses"
echo 'raise ImportError("another'"'"'s folder must not be imported")' | tee "$work/mine/attacks/__init__.py" > "$work/mine/defenses/__init__.py"
cd "$work/mine"
"$work/venv/bin/ppbench" list
"$work/venv/bin/python" -m ppbench evaluate --defense spn --grid 0.1 --model mlp --rounds 12 --clients 2 --victims 2 --attack-batch 1 \
  --stage init --attack dlg,label_recovery --set dlg.budget=300 --workers 1
"$work/venv/bin/ppbench" verify ppbench-results

# Three packages of somebody else, installed as such: found, evaluated, and their own tests pass with the plugin.
# Without an index: what they need is there already, under the name by which they ask for it.
"$work/venv/bin/pip" install -q pytest "setuptools>=77"
cp -r "$root/examples/my_defense" "$root/examples/my_attack" "$root/examples/my_question" .
rm -rf my_*/build my_*/src/*.egg-info
"$work/venv/bin/pip" install -q --no-index --no-build-isolation ./my_defense ./my_attack ./my_question
"$work/venv/bin/ppbench" list | grep -F "sign_sgd         [ppbench-sign-sgd]"
"$work/venv/bin/ppbench" list | grep -F "row_ratio        [ppbench-row-ratio]"
"$work/venv/bin/ppbench" list | grep -F "attribute        [ppbench-column-guess]"
"$work/venv/bin/ppbench" evaluate --defense sign_sgd --model mlp --grid 5 --rounds 12 --clients 2 --victims 4 --attack-batch 1 \
  --stage init --attack row_ratio --workers 2 --out theirs
"$work/venv/bin/ppbench" verify theirs
(cd my_attack && "$work/venv/bin/python" -m pytest -q -p no:cacheprovider)
(cd my_question && "$work/venv/bin/python" -m pytest -q -p no:cacheprovider)
(cd my_defense && "$work/venv/bin/python" -m pytest -q -rs --ppbench-out=results)
"$work/venv/bin/ppbench" baseline accept my_defense/results/sign-sgd-small-* my_defense/baseline --reason "first measured"
(cd my_defense && "$work/venv/bin/python" -m pytest -q --ppbench-out=results --ppbench-baseline=baseline)

# Another distribution that has a package ppbench, installed later: said at start, and the very commands given repair it.
"$work/venv/bin/python" - "$work" <<'PY'
import sys, zipfile

files = {"ppbench/__init__.py": "import no_such_module\n", "ppbench-0.3.dist-info/METADATA": "Metadata-Version: 2.1\nName: ppbench\nVersion: 0.3\n"}
files["ppbench-0.3.dist-info/WHEEL"] = "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
with zipfile.ZipFile(f"{sys.argv[1]}/ppbench-0.3-py3-none-any.whl", "w") as wheel:
    for name, text in {**files, "ppbench-0.3.dist-info/RECORD": "".join(f"{name},,\n" for name in files)}.items():
        wheel.writestr(name, text)
PY
"$work/venv/bin/pip" install -q --no-index "$work/ppbench-0.3-py3-none-any.whl"
code=0
sentence=$("$work/venv/bin/ppbench" list 2>&1) || code=$?
[ "$code" = 2 ] && grep -F "was overwritten by the distribution ppbench 0.3" <<< "$sentence"
repair=${sentence##*Repair it: }
PATH="$work/venv/bin:$PATH" PIP_NO_INPUT=1 bash -euo pipefail -c "${repair/pip uninstall/pip uninstall -y}"
"$work/venv/bin/ppbench" list | grep -F "sign_sgd         [ppbench-sign-sgd]"
echo "wheel test passed"
