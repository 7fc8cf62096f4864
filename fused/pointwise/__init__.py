"""Passes that no matmul computes: norms and rotation of heads, the last norm, and pointwise programs."""
