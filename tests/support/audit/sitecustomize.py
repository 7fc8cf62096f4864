"""Python imports this at its start where the tests put it on the path: every child they start is watched."""

import atexit
import gc
import sys

import candidate_watch


# agent.cli.main does the same; its import would cost each watched child more than this saves.
def _skip_the_last_collection() -> None:
    if "triton" not in sys.modules:  # whose nanobind takes what is left at the end for leaks
        gc.freeze()


candidate_watch.install()
# A third of the time of a short process would be spent on looking through what PyTorch's import made.
gc.set_threshold(100_000)
atexit.register(_skip_the_last_collection)
