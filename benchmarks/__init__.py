"""Speed, measured side by side in one run; never asserted in a test. `python -m benchmarks` runs all and prints a table."""
