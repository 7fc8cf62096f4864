"""Set the clock one hour ahead in every Python process of a simulated node."""

import time

_right = time.time
time.time = lambda: _right() + 3600.0
