"""Models, losses and data of one's own, each with a config; see README.md."""
