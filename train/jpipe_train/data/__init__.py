"""Data for training and validation: batches by index, whose rows are read when they are needed."""
