"""Mutants of a program: each has one mistake."""
