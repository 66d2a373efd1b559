"""Audits: trainings of their own, with canaries and reference runs, on which membership is asked at full strength."""
