"""Convert the `config.json` of a folder in Hugging Face's layout to keys of the section `model` and back, without JAX."""
