"""Conversations as training data. Chat templates are rendered in a separate process, and the tokens of answers are found."""
