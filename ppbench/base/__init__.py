"""Foundations: trees of tensors, gradients, seeds, errors, the registry of plugins."""
