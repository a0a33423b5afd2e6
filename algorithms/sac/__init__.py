"""Soft actor-critic: continuous actions from a replay, with learned entropy (Haarnoja et al. 2018)."""
