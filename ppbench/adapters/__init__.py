"""Defenses of other frameworks as they are: nothing else in the program names one, nothing imports it unasked."""
