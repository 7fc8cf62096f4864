"""The layer as people arranged it from accepted kernels, which ``benchmarks`` compare derived ones with."""
