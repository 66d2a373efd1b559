"""MP-DP (Yang et al. 2024): model perturbation whose scales and noise multiply to a Gaussian; baselines; a variant."""
