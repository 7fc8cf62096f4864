"""Measure fp8 kernels: the accuracy of an MLP and a layer, and the time of an MLP."""
