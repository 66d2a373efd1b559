"""Attacks that decide whether a record was trained on."""
