"""Author, check and measure many specs on many processors and GPUs."""
