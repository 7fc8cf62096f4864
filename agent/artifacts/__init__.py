"""What leaves a run or comes back to it: accepted kernels, bundles, measurements."""
