"""The ledger: views of adversaries, frozen and published, and others' guesses scored against the truth, kept here.

`form` defines the files, `publish` writes them, `transcript` reads them; `score` reads answers, scores them and decides
whether a worst case moves; `submission` and `examination` are for results of other packages. For users: docs/ledger.md.
"""
