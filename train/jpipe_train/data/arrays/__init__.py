"""Arrays of numbers for a user's own model: inputs and targets, from rows of files or from NumPy's files."""
