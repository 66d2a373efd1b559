"""`ppbench compare`: whether a defense leaks more than before, cell by cell and victim by victim.

`join` pairs the cells of two folders, `paired` aligns their victims and estimates the change, `judge` lists the rows
and gives each a verdict, `alone` finds victims that fall by themselves, `outcome` checks the controls first, `report`
writes the report.
How a verdict is reached and what it can detect: docs/compare.md.
"""
