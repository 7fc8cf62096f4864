"""The operations of the vocabulary, a file for each family."""
