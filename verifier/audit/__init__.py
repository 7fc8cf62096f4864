"""Audit committed reports, and check that they cover the committed files."""
