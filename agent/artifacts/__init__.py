"""Artifacts of runs: accepted kernels, bundles, measurements."""
