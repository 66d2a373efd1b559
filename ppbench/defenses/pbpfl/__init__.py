"""PBPFL (Feng et al. 2020): clients train on a perturbed model that they cannot read.

protocol: a round. extended: the same with masks, so that only sums can be read (Appendix C). perturbation: messages
and algebra, which MP-DP shares. evidence: what is known of a victim.
"""
