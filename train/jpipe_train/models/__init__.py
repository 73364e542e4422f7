"""The built-in language models as layers, and their loss: decoders, such as GPT-2, Llama and the GPT over bytes, and BERT."""
