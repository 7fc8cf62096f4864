"""The one import root: ``src/coda_agent`` is this folder."""
