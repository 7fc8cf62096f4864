"""Specs: the definitions of operators, read from YAML and checked."""
