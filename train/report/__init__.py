"""What a run leaves to look at: metrics, measurements, pictures and the report."""
