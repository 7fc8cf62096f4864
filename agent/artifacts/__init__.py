"""Artifacts of runs: accepted kernels, bundles, new primitives."""
