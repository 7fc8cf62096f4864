"""Compare derived backwards with those that people arranged: their time, and the bytes they move."""
