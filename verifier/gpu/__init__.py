"""Work on a GPU in worker processes: checks, benchmarks and telemetry."""
