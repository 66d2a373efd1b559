"""`ppbench compare`: whether a defense leaks more than it did, cell by cell and victim by victim.

`join` finds the cells of two folders that ask the same, `samples` lines their victims up, `paired` estimates what
changed, `rows` of what, `judge` makes verdicts of it, `outcome` puts the controls first, `report` and `machine` tell.
How a verdict is reached and what it can find: docs/compare.md.
"""
