"""Where a model's source is checked and traced, without being trusted."""
