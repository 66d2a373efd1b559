"""Attacks of servers that act: they choose the weights that clients are sent, and read what comes."""
