"""The clock of a node that is an hour ahead: every Python process there has it."""

import time

_right = time.time
time.time = lambda: _right() + 3600.0
