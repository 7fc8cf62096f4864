"""A run: the loop, its journal, its budget and its record."""
