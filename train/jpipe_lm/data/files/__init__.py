"""Files of tokens, and limits for tokenizers from strangers."""
