"""Honest rewrites of a program: each computes the same."""
