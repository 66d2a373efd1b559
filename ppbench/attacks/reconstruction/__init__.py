"""Attacks that rebuild inputs from updates.

`dlg` is where to begin, with the plain loop that it is tested against (`dlg_reference`). `search` holds what is sought
and the two minimizers, `fastpath` a faster gradient of the matching loss for plain chains of layers.
"""
