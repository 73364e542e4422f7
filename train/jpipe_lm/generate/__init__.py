"""`jpipe generate`: text from a model that a run has trained, or from a folder in Hugging Face's layout."""
