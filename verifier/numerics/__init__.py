"""Numerical truth: references, inputs, the error gate, and how strong they are."""
