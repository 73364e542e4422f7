"""The built-in models as layers: GPT-2, Llama, BERT and the GPT over bytes, and their loss; GNMT, AWD-LM, S2VT; models of images."""
