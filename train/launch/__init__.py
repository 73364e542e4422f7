"""Several processes: how they start, meet, agree and end."""
