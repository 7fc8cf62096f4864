"""Shift the clock of every Python process of a simulated node one hour ahead."""

import time

_right = time.time
time.time = lambda: _right() + 3600.0
