"""Attacks of active servers: they choose the weights that clients receive, and read the uploads."""
