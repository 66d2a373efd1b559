"""No two published views share a victim: who reads one would answer the other."""

from types import SimpleNamespace

import torch

from ppbench.ledger.publish import _disjoint


def test_of_two_views_with_a_victim_in_common_the_second_is_left_out_and_roles_of_one_are_no_two(fabricate):
    config = fabricate("dp", 0.1, "dlg", "reconstruction", control="sigma").config

    def scene(title, start, **more):
        victims = torch.arange(start * 4.0, (start + 3) * 4).reshape(3, 1, 2, 2)
        return SimpleNamespace(title=title, config=config.model_copy(update=more), victims=victims)

    first, meets = scene("first", 0, victims_from=0), scene("meets it", 2, victims_from=2)
    pilot, rest = (scene(role, 10, victims_from=9, role=role) for role in ("pilot", "ternary"))
    kept, secrets, reasons = _disjoint([first, meets, pilot, rest])
    assert kept == [first, pilot, rest] and len(secrets) == 2
    (clause,) = reasons
    assert clause.startswith("meets it: ") and "in common with first" in clause
