"""Test the numerical checks: each choice in a program must matter on some tried input, and each mutant of a
spec must fail."""
