"""From candidates to a ranking: which plans are simulated, and the ranking as a table and a picture."""
