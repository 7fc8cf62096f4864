"""Run Hugging Face models with fused parts: whole models, decoder layers, the last norm and the loss."""
