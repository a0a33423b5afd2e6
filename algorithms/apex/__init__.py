"""Ape-X: Q-learning from a prioritised replay that many actors fill (Horgan et al. 2018, arXiv:1803.00933)."""
