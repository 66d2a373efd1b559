"""Attacks that compute the true model's outputs from what a party holds."""
