"""The built-in language models as layers, and their loss: GPT-2, Llama, BERT and the GPT over bytes."""
