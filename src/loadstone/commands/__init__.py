"""The subcommands. Each function takes the parsed arguments and returns the exit status."""
