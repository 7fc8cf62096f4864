"""The kernel language: symbolic sizes, programs as graphs, tracing, and the meanings of operations."""
