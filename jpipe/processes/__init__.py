"""Between processes: who is there, how they talk, and the links that carry arrays."""
