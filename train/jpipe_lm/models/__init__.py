"""The built-in language models as layers: decoders, such as GPT-2, Llama and the GPT over bytes, and BERT."""
