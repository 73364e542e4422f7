"""The output of a run: metrics, measurements, pictures and the report."""
