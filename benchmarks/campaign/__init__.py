"""Judge mutants and equivalent rewrites of accepted programs with the verifier.

``python -m benchmarks.campaign`` runs these programs through the gates that need neither a compiler nor a
GPU.
"""
