"""`jpipe generate`: generate text with a model from a run folder, or from a folder in Hugging Face's layout."""
