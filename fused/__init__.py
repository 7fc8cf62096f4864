"""Accepted kernels for PyTorch programs."""
