"""From candidates to a ranking: what is simulated, and the ranking as a table and a picture."""
