"""BAFFLE (Feng et al. 2023): clients train by forward passes alone, and answer with loss differences.

protocol: a round. estimator: directions, loss differences, Stein's estimate. masks: fixed-point numbers whose masks
cancel. messages: what travels, and what is refused. evidence: what is known of a victim.
"""
