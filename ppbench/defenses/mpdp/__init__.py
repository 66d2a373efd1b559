"""MP-DP (Yang et al. 2024): model perturbation whose scales and noise multiply to a Gaussian.

protocol: MP-DP. model_perturbation: what it shares with its baselines. baselines: naive and central noise. hardened: a
variant of our own. expansion, surgery: transitional layers. laws: of scales and noise. accounting: the paper's
theorems. known_scales: what is left of them against who knows the scales. evidence: what is known of a victim.
"""
