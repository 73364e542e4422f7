"""`jpipe generate`: text from a model that a run has trained, or that is in a folder of Hugging Face's layout."""
