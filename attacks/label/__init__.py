"""Attacks that recover labels."""
