"""The commands that work on several runs, one module each."""
