"""Text as data: documents, conversations and labelled rows; tokenizers; files of tokens."""
