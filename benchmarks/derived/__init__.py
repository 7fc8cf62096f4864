"""Compare derived backwards with backwards that people arranged, by time and by bytes moved."""
