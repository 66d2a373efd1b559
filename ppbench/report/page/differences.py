"""In what rows of a board differ besides their defense and its control value: seeds, federations, other parameters."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence

from ppbench.records.schema import Scalar
from ppbench.report.frame import Key


def differences(rows: Sequence[Key]) -> dict[Key, str]:
    """Return, for each row, its values of what differs among rows, as "families=shared, seed 1"; "" where nothing does.

    Parameters are compared among the rows of one defense, the federation and the seed among all.
    """
    seen: dict[tuple[str, str], set[Scalar]] = defaultdict(set)
    told = {key: _values(key) for key in rows}
    for some in told.values():
        for about, value in some.items():
            seen[about].add(value)
    return {
        key: ", ".join(_word(name, value) for (where, name), value in some.items() if len(seen[where, name]) > 1)
        for key, some in told.items()
    }


def _values(key: Key) -> dict[tuple[str, str], Scalar]:
    """Return what may differ by (defense, name); ("", name) for what all defenses have."""
    mine = {(key.defense, name): value for name, value in json.loads(key.parameters).items()}
    mine[key.defense, "version"] = key.version
    federation = json.loads(key.federation)
    shared = {
        ("", name): value if isinstance(value, str | int | float) else str(value) for name, value in federation.items()
    }
    return mine | shared | {("", "seed"): key.seed}


def _word(name: str, value: Scalar) -> str:
    told = f"{value:g}" if isinstance(value, float) else str(value)
    return f"seed {told}" if name == "seed" else f"{name}={told}"
