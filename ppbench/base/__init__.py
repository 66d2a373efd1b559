"""What everything stands on: trees of tensors, gradients, seeds, errors, the registry of plugins."""
