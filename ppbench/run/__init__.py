"""Running: what computes cells, and what vouches for the harness that does."""
