"""A run: the loop, its tasks, its tools and its budget."""
