"""The layer as people arranged it from accepted kernels, to compare derived layers with."""
