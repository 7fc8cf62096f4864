"""Make fused parts compute Hugging Face models: whole models, decoder layers, the last norm and the loss."""
