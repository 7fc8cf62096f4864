"""Author, check and measure many specs on many cores and GPUs."""
