"""Several hosts on a slow network, made on one machine out of network namespaces. `python -m benchmarks.hosts` prints tables."""
