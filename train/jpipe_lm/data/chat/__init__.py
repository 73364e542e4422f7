"""Conversations as training data: chat templates, rendered in a separate process, and the tokens that assistants wrote."""
