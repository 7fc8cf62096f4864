"""Specs: what an operator must compute, read from YAML and checked."""
