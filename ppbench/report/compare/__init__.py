"""`ppbench compare`: whether a defense leaks more than it did, cell by cell and victim by victim.

    join -> samples -> paired -> judge -> outcome -> report

`join` finds the cells of two folders that ask the same, `samples` lines their victims up, `paired` estimates what
changed, `judge` makes verdicts of it, `outcome` puts the controls first, `report` prints. How a verdict is reached and
what it can find: docs/compare.md.
"""
