"""Rows in words. Names are other people's: nothing in them gets out of a line."""

from __future__ import annotations

from ppbench.report.compare.judge import Row


def printable(text: str) -> str:
    """Return `text` with a question mark for every character that is not to be shown: no escape sequence gets out."""
    return "".join(c if c.isprintable() else "?" for c in text)


def point(row: Row) -> str:
    """Return defense and control value, as "dp sigma=0.01"."""
    where = row.where
    value = f" {where.control}={where.value:g}" if where.value is not None else f" over {where.control}"
    return printable(f"{where.defense}{value if where.control else ''}")


def attack_of(row: Row) -> str:
    """Return the attack, with the one whose images it uses; "" where none is needed."""
    where = row.where
    return printable(f"{where.attack} after {where.follows}" if where.follows else where.attack)


def metric_of(row: Row) -> str:
    """Return the metric with its subset, as "auc (canaries)"; "all" where the whole cell is meant."""
    return f"{row.metric} (canaries)" if row.subset == "canaries" else row.metric or "all"


def named(row: Row) -> str:
    """Return the row in one line, as "dlg, init, batch 1, to server: psnr_median"."""
    about = ", ".join(part for part in (attack_of(row), printable(place(row))) if part)
    return f"{about}: {metric_of(row)}" if about else metric_of(row)


def figure(row: Row, value: float) -> str:
    """Return a figure with the digits that its metric deserves."""
    digits = 2 if row.metric in ("psnr_median", "epsilon_claimed", "epsilon_lower") else 3
    return f"{round(value, digits) + 0.0:.{digits}f}"  # no "-0.000"


def place(row: Row) -> str:
    """Return stage, batch size and threat model of a row in words, "" where it is about none."""
    where = row.where
    parts = [where.stage, f"batch {where.batch}" if where.batch else "", f"to {where.threat}" if where.threat else ""]
    parts += [where.role, f"probe {where.probe} x{where.probe_rounds}" if where.probe == "local" else ""]
    return ", ".join(part for part in parts if part)
