"""The language of kernels: symbolic sizes, programs as graphs, tracing, and the meanings of operations."""
