"""PBPFL (Feng et al. 2020): clients train on a perturbed model that they cannot read; `round` is shared with MP-DP."""
