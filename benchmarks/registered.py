"""Entries of leaderboards/register.toml, as .github/workflows/register.yml asks for them.

    python benchmarks/registered.py list            the names of all entries, as JSON
    python benchmarks/registered.py install NAME    what pip is to install
    python benchmarks/registered.py run NAME OUT    is it what is pinned, and does its suite give the same figures?

Exit code 0: all is as pinned; 1: something differs, or cells failed; 3: controls do not hold.
"""

import json
import sys
from pathlib import Path

from ppbench.ledger.submission import load_register, moved_figures, pin_faults

ROOT = Path(__file__).resolve().parent.parent
REGISTER = ROOT / "leaderboards" / "register.toml"


def run(name, out, engine="local"):
    """Compute an entry's suite into `out`, print what differs, and return the exit code."""
    group, entry = load_register(REGISTER).named(name)
    if values := pin_faults(group, entry):
        print(*values, sep="\n")
        return 1
    from ppbench.base.bars import Bars
    from ppbench.claims.check import claimed
    from ppbench.report.controls import exit_of
    from ppbench.run.suite import load_suite
    from ppbench.run.sweep import sweep
    from ppbench.verification import verify
    from ppbench.verification.recheck import recheck

    suite, defense = ROOT / entry.suite if entry.suite.endswith(".toml") else entry.suite, group == "defenses"
    configs = load_suite(suite, add=[name] if defense else [])
    only = {"defense": [name]} if defense else {"attack": [name]}
    with Bars() as bars:
        result = sweep(configs, out=out, engine=engine, only=only, progress=bars)
    if code := exit_of(result.records, result.reliable):
        print(result.answer.trust.sentence)
        return int(code)
    values = [*verify(Path(out), claimed, recheck), *moved_figures(entry, result.records)]
    print(
        *(values or [f"{name}: {len(result.records)} cells of {configs.name}, {len(entry.figure)} figures as pinned."]),
        sep="\n",
    )
    return int(bool(values))


def main(words):
    """Do what is asked for on the command line, and return the exit code."""
    if words == ["list"]:
        print(json.dumps([entry.name for _, entry in load_register(REGISTER).entries()]))
        return 0
    if len(words) == 2 and words[0] == "install":
        install = load_register(REGISTER).named(words[1])[1].install
        print(ROOT / install if (ROOT / install).is_dir() else install)
        return 0
    if len(words) == 3 and words[0] == "run":
        return run(*words[1:])
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
