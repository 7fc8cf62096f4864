"""Watch every child process that the tests start. The tests put this module on the import path, and a child's
Python imports the module at startup."""

import atexit
import gc
import sys

import candidate_watch


# ``agent.cli.main`` does the same. Importing that module here would cost each watched child more time than
# the skipped collection saves.
def _skip_the_last_collection() -> None:
    if "triton" not in sys.modules:  # triton's nanobind would report the frozen objects as leaks
        gc.freeze()


candidate_watch.install()
# A short process would otherwise spend a third of its time on searching the objects that PyTorch's import
# creates.
gc.set_threshold(100_000)
atexit.register(_skip_the_last_collection)
