"""What is read off traced computations: what depends on what, what is needed, what mixes rows, which arrays come from outside."""
