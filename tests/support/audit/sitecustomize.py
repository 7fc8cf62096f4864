"""Python imports this at its start where the tests put it on the path: every child they start is watched."""

import candidate_watch

candidate_watch.install()
