"""Several hosts on a slow network, made on one machine from network namespaces. `python -m benchmarks.hosts` prints tables."""
