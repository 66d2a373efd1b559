"""`ppbench compare`: whether a defense leaks more than before, cell by cell and victim by victim.

`join` pairs the cells of two folders, `samples` aligns their victims, `paired` estimates the change, `rows` lists the
rows, `judge` gives each a verdict, `outcome` checks the controls first, `report` and `machine` write the report.
How a verdict is reached and what it can detect: docs/compare.md.
"""
