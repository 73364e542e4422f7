"""Text from a trained language model."""
