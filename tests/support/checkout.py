"""The folders of this checkout, and the import path for a child process that imports the same modules as the
tests."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS, SUPPORT = ROOT / "tests", ROOT / "tests" / "support"
PYTHONPATH = os.pathsep.join(map(str, (ROOT / "src", TESTS, SUPPORT)))
