"""A Transformer layer that people arranged from accepted kernels, to compare with derived layers."""
