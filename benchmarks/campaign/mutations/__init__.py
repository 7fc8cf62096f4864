"""Make mutants of a program. Each mutant has one mistake."""
