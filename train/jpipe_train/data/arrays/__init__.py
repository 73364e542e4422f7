"""Arrays of numbers, inputs and targets, for a user's own model. They are read from rows of files or from NumPy files."""
