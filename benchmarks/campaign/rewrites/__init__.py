"""Rewrites of a program that keep its meaning."""
