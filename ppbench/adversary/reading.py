"""Whether a view holds evidence for an attack, and whether that evidence is well-formed."""

from __future__ import annotations

from collections.abc import Sequence

from ppbench.adversary.attack import Attack, Challenge
from ppbench.base.blame import refuse, stranger
from ppbench.base.tree import leaves
from ppbench.federation.declared import evidence_faults
from ppbench.federation.view import View


def reads_anything(attack: Attack, view: View, challenges: Sequence[Challenge]) -> bool:
    """Return whether a view holds evidence for an attack, see `readable`. PluginError: the evidence is malformed."""
    check_evidence(attack, view)
    return readable(attack, view, challenges)


def is_silent(view: View) -> bool:
    """Return whether no message of a view carries a tensor, so that nothing can be asked about it."""
    return not any(leaves(letter.message) for letter in view.mail)


def check_evidence(attack: Attack, view: View) -> None:
    """Raise PluginError for malformed evidence of a third-party defense or attack, before other code fails on it."""
    if stranger("defenses", view.defense.name):
        refuse("defenses", view.defense.name, evidence_faults(view.defense.evidence(view)))
    if stranger("attacks", attack.name):
        refuse("attacks", attack.name, evidence_faults(attack.evidence(view)))


def readable(attack: Attack, view: View, challenges: Sequence[Challenge]) -> bool:
    """Return whether a view holds evidence for an attack: its own, or the defense's unless it `reads_alone`."""
    evidence = attack.evidence(view)
    if not attack.reads_alone:
        return bool(evidence or view.defense.evidence(view))
    slots = {slot for one in evidence for slot in one.unit if len(one.unit) == 1}
    units = {frozenset(one.unit) for one in evidence}
    return any(frozenset(c.unit) in units or slots.issuperset(c.unit) for c in challenges)
