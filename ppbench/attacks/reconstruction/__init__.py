"""Attacks that reconstruct inputs from updates.

Begin with `dlg`. `search` has the search problems and the two minimizers, `fastpath` a faster gradient of the matching
loss for plain chains of layers.
"""
