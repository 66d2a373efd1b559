"""Attacks that reconstruct inputs from updates.

Begin with `dlg` and the plain loop that it is tested against (`dlg_reference`). `search` has the search problems and
the two minimizers, `fastpath` a faster gradient of the matching loss for plain chains of layers.
"""
