"""What a kernel has to beat: PyTorch, cuBLAS and QuACK."""
