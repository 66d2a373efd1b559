"""Audits: trainings of their own, with canaries and reference runs, for the strongest membership questions."""
