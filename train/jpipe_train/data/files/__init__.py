"""The content of data files: its kind, and arrays that are read in parts."""
