"""In what rows of a board differ besides their defense and its control value: seeds, federations, other parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from ppbench.records.schema import CellConfig, Scalar


def differences(rows: Mapping[str, CellConfig]) -> dict[str, str]:
    """Return, for each row, its values of what differs among rows, as "families=shared, seed 1"; "" where nothing does.

    Parameters are compared among the rows of one defense, the federation and the seed among all.
    """
    seen: dict[tuple[str, str], set[Scalar]] = defaultdict(set)
    told = {key: _values(config) for key, config in rows.items()}
    for some in told.values():
        for about, value in some.items():
            seen[about].add(value)
    return {
        key: ", ".join(_word(name, value) for (where, name), value in some.items() if len(seen[where, name]) > 1)
        for key, some in told.items()
    }


def _values(config: CellConfig) -> dict[tuple[str, str], Scalar]:
    """Return what may differ by (defense, name); ("", name) for what all defenses have."""
    defense, control = config.defense, config.defense.control
    mine = {
        (defense.id, name): value
        for name, value in defense.parameters.items()
        if control is None or name != control.name
    }
    federation = {
        ("", name): value if isinstance(value, str | int | float) else str(value) for name, value in config.federation
    }
    return mine | federation | {("", "seed"): config.seed}


def _word(name: str, value: Scalar) -> str:
    told = f"{value:g}" if isinstance(value, float) else str(value)
    return f"seed {told}" if name == "seed" else f"{name}={told}"
