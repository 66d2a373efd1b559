"""Whether an attack has anything to go by in a view, and whether what is called evidence there is any."""

from __future__ import annotations

from collections.abc import Sequence

from ppbench.adversary.attack import Attack, Challenge
from ppbench.base.blame import refuse, stranger
from ppbench.base.tree import leaves
from ppbench.federation.declared import evidence_faults
from ppbench.federation.view import View


def read(attack: Attack, view: View, challenges: Sequence[Challenge]) -> bool:
    """Return whether an attack has anything to go by, see `readable`. PluginError: what is called evidence is none."""
    check_evidence(attack, view)
    return readable(attack, view, challenges)


def silent(view: View) -> bool:
    """Return whether no message of a view carries anything: a party that keeps to itself cannot be asked about."""
    return not any(leaves(letter.message) for letter in view.mail)


def check_evidence(attack: Attack, view: View) -> None:
    """Refuse evidence of a stranger's that is none (PluginError): others would fail on it, and be blamed."""
    if stranger("defenses", view.defense.name):
        refuse("defenses", view.defense.name, evidence_faults(view.defense.evidence(view)))
    if stranger("attacks", attack.name):
        refuse("attacks", attack.name, evidence_faults(attack.evidence(view)))


def readable(attack: Attack, view: View, challenges: Sequence[Challenge]) -> bool:
    """Return whether an attack has anything to go by: its evidence, or the defense's where it may use that too."""
    found = attack.evidence(view)
    if not attack.reads_alone:
        return bool(found or view.defense.evidence(view))
    told = {slot for evidence in found for slot in evidence.unit if len(evidence.unit) == 1}
    units = {frozenset(evidence.unit) for evidence in found}
    return any(frozenset(c.unit) in units or told.issuperset(c.unit) for c in challenges)
