"""Read and write files of tokens, and limit tokenizers that may come from strangers."""
