"""Attacks that rebuild inputs from updates.

`dlg` is the attack; `search` and `match_gradients` are what other attacks call with evidence of their own; `chain` is
the fast gradient of the matching loss, `lbfgs` the optimizer.
"""
