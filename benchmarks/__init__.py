"""Speed measurements, side by side in one run and never asserted in a test; `python -m benchmarks` runs all and prints a table."""
