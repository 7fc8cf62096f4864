"""The coda-agent command: one file for each group of subcommands."""
