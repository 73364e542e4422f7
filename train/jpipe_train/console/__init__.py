"""The output of a run in a terminal, and the signals that a run handles."""
