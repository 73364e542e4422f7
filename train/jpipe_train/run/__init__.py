"""A whole run, from its start to its end."""
