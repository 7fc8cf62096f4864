"""Profile the layer's backward kernel by kernel, and that of ``torch.compile``.

``python -m benchmarks.layer_profile measure --out FILE.json`` on an H100, then ``python -m
benchmarks.layer_profile draw FILE.json --out docs/layer_backward.md`` anywhere.
"""
