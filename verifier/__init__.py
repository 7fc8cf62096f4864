"""What decides whether a kernel is right and fast: docs/verification.md."""

import os

# PyTorch's threads on a CPU wait for each other spinning. Where another process wants the cores, two runs at
# once say, a second of the interpreter takes half a minute so. Read when PyTorch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
