"""Run programs on a GPU: compile, tune, plan and launch."""
