"""Emulate several hosts on a slow network by network namespaces of one machine; `python -m benchmarks.hosts` prints tables."""
