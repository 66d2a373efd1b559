"""BAFFLE (Feng et al. 2023): clients train by forward passes alone, and answer with loss differences."""
