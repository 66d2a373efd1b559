"""Attacks that rebuild inputs from updates."""
