"""Files of tokens, and limits for tokenizers that strangers wrote."""
