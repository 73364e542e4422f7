"""The content of data files: what kind it is, and arrays that are read from it in parts."""
