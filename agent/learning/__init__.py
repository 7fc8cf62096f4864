"""Learn tips from runs, and measure whether they help."""
