"""The built-in language models as layers: BERT, and decoders such as GPT-2, Llama and the GPT over bytes."""
