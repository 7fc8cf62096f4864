"""The language of kernels: symbolic sizes, programs as graphs, tracing, and what each operation means."""
