"""Attacks aware of one defense: of its mechanism and public parameters, not of its secrets."""
