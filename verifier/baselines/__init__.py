"""Baselines: PyTorch, cuBLAS and QuACK."""
