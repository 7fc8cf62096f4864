"""Profile the backward of the comparison's layer kernel by kernel, in our kernels and under
``torch.compile``.

First run ``python -m benchmarks.layer_profile measure --out FILE.json`` on an H100, then ``python -m
benchmarks.layer_profile draw FILE.json --out docs/layer_backward.md`` on any machine.
"""
