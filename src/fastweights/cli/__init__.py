"""The command line: parses, calls, prints. One file per group of commands."""
