"""The built-in language models as layers: GPT-2, Llama, BERT, and the GPT over bytes; their loss."""
