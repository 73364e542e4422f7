"""The arguments of the built-in targets: models of images and of sequences, and their data."""
