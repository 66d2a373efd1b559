"""Attacks that rebuild inputs from updates.

`dlg` is where to begin, beside it the plain loop that it is tested against (`dlg_reference`). `search` holds what is
searched and the two minimizers, `fastpath` a faster gradient of the matching loss for plain chains of layers.
"""
