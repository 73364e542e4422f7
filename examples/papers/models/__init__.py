"""Models of images and of sequences, as layers of a pipeline."""
