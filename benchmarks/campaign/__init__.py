"""Mutants and honest rewrites of accepted programs, and how the verifier judges them.

``python -m benchmarks.campaign`` runs them through the gates that need neither a compiler nor a GPU.
"""
