"""Running programs on a GPU: compiled, tuned, planned and launched."""
