"""The ledger: what an adversary saw, frozen and published; guesses of others scored against the truth that stays here.

`form` says what the files hold, `publish` writes them, `transcript` reads them, `guesses` reads answers, `score` scores
them, `judge` decides whether a worst case moves, `book` keeps who moved it when. For users: docs/ledger.md.
"""
