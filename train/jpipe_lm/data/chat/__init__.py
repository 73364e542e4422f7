"""Conversations as training data: chat templates, rendered in a process of their own, and the tokens that assistants wrote."""
