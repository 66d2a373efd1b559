"""The ledger: views of adversaries, frozen and published, and others' guesses scored against the truth, kept here.

`form` defines the files, `publish` writes them, `transcript` reads them, `guesses` reads answers, `score` scores them,
`judge` decides whether a worst case moves, `book` records who moved it when. For users: docs/ledger.md.
"""
