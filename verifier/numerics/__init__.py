"""Numerical checks: references, inputs, the error gate, and tests of their strength."""
