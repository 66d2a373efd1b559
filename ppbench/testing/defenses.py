"""The conformance battery of defenses: the properties that every defense must have."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial

from ppbench.base.errors import UsageError
from ppbench.federation.contract import Defense
from ppbench.records.scores import Scalar
from ppbench.testing import mechanics, secrecy, tradeoff
from ppbench.testing.findings import Finding, Property, ask_all, raise_failures
from ppbench.testing.scene import DefenseTrial

DEFENSE_PROPERTIES: Mapping[str, Property[DefenseTrial]] = {
    "declares_itself": mechanics.declares_itself,
    "one_seed_one_result": mechanics.one_seed_one_result,
    "resumes": partial(mechanics.resumes, schedule="parallel"),
    "resumes_round_robin": partial(mechanics.resumes, schedule="round_robin"),
    "probes_move_nothing": mechanics.probes_move_nothing,
    "probes_are_steps_of_training": mechanics.probes_are_steps_of_training,
    "loop_equals_vmap": mechanics.loop_equals_vmap,
    "bytes_are_counted": mechanics.bytes_are_counted,
    "messages_keep_their_form": mechanics.messages_keep_their_form,
    "all_goes_over_the_wire": mechanics.all_goes_over_the_wire,
    "secrets_from_the_server": partial(secrecy.no_view_reaches_a_secret, threat="server/1"),
    "secrets_from_a_client": partial(secrecy.no_view_reaches_a_secret, threat="client/1"),
    "secrets_from_a_listener": partial(secrecy.no_view_reaches_a_secret, threat="eavesdropper/1"),
    "secrets_after_training": partial(secrecy.no_view_reaches_a_secret, threat="server/1", after=2),
    "a_view_survives_the_disk": secrecy.a_view_survives_the_disk,
    "evidence_is_what_the_server_steps_on": secrecy.evidence_is_what_the_server_steps_on,
    "off_level_equals_none": tradeoff.off_level_equals_none,
    "control_moves_accuracy_one_way": tradeoff.control_moves_accuracy_one_way,
}
"""The properties by name. `tests/test_defense_contract.py` checks every defense of ppbench."""


def check_defense(
    defense: type[Defense] | Defense,
    *,
    off: Mapping[str, Scalar] | None = None,
    only: Collection[str] = (),
    skip: Mapping[str, str] | None = None,
) -> tuple[Finding, ...]:
    """Check all of `DEFENSE_PROPERTIES` of a defense, installed or not, in seconds; return one finding per property.

    defense: the class, for its default parameters, or an instance; off: parameters at which it does nothing, as
    {"sigma": 0.0}, and must train as `none` does; only: names of the properties to check; skip: properties that it
    breaks on purpose, with the reason.
    AssertionError: a line for each property that fails, with what happened and what is right. UsageError: no defense,
    or an unknown property.
    """
    instance = defense() if isinstance(defense, type) and issubclass(defense, Defense) else defense
    if not isinstance(instance, Defense):
        raise UsageError(f"{defense!r} is no defense; give a subclass of ppbench.Defense, or an instance of one.")
    trial = DefenseTrial(instance, None if off is None else tuple(off.items()))
    findings = ask_all(trial, DEFENSE_PROPERTIES, only, skip or {})
    raise_failures(f"Defense {getattr(instance, 'name', type(instance).__name__)!r}", findings)
    return findings
