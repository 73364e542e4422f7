"""The weights of language models in files: Hugging Face's layout, and adapters."""
