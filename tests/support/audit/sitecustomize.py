"""Watch every child process that the tests start. The tests put this module on the import path, and a child's
Python imports the module at startup."""

import atexit
import gc
import sys

import candidate_watch


# ``agent.cli.main`` has a function that skips Python's last garbage collection in the same way. An import of
# ``agent.cli.main`` would cost each watched child more time than the skipped collection saves.
def _skip_the_last_collection() -> None:
    if "triton" not in sys.modules:  # triton's nanobind would report the frozen objects as leaks
        gc.freeze()


candidate_watch.install()
# With Python's usual threshold, garbage collections would search all objects that PyTorch's import creates.
# This would take a third of a short process's time.
gc.set_threshold(100_000)
atexit.register(_skip_the_last_collection)
