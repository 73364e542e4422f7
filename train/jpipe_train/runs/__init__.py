"""Many runs: list their folders, compare them, and sweep over values of a config."""
