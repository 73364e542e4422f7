"""Work with several runs: list their folders, compare them, and sweep over config values."""
