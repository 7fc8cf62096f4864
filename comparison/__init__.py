"""``coda-agent compare``: accepted kernels against kernels by people and against libraries, on one H100."""
