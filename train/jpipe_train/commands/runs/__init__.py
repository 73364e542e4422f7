"""The commands for many runs, one module each."""
