"""``coda-agent compare``: compare accepted kernels with hand-written kernels and libraries, on one H100."""
