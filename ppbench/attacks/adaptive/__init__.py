"""Attacks that know one defense: its mechanism and public parameters, not its secrets."""
