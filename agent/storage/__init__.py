"""Files of runs and of accepted kernels: journals, locks, stores of finished stages."""
