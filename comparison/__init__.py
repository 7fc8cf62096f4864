"""``coda-agent compare``: accepted kernels against people's and against what is used today, on one H100."""
