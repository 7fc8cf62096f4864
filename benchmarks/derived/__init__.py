"""Compare derived backwards with backwards that people arranged: their times, and the bytes they move."""
