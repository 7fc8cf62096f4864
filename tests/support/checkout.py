"""The folders of this checkout, and the import path of a Python process that imports as tests do."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS, SUPPORT = ROOT / "tests", ROOT / "tests" / "support"
PYTHONPATH = os.pathsep.join(map(str, (ROOT / "src", TESTS, SUPPORT)))
