"""Rankings of candidates: which plans are simulated, and the ranking as a table and a picture."""
