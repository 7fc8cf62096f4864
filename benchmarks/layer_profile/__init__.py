"""Profile the backward of the comparison's Transformer layer, in our kernels and under ``torch.compile``.
The profile has the time of every kernel.

First run ``python -m benchmarks.layer_profile measure --out FILE.json`` on an H100, then ``python -m
benchmarks.layer_profile draw FILE.json --out docs/layer_backward.md`` on any machine.
"""
