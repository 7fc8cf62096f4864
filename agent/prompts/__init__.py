"""The prompt pack: everything that an author reads."""
