"""Mutants of a program: each is wrong by one mistake."""
