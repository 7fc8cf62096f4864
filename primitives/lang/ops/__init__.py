"""The operations of the vocabulary, one file per family."""
