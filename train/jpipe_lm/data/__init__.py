"""Text data: documents, conversations, labelled rows, tokenizers and files of tokens."""
