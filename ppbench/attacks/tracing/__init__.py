"""Attacks that decide which client an image came from."""
