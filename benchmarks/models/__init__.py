"""Measure Hugging Face models with fused parts: training, decoding, and the memory of a layer."""
