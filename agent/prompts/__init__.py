"""The prompt pack: all text for authors."""
