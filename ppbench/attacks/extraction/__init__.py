"""Attacks that compute the true model's outputs from a party's view."""
