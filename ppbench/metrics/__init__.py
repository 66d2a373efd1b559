"""Scores: images, membership, tracing, CAP, and the intervals of all of them."""
