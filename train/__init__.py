"""The application: train a byte-level GPT through a pipeline, from a YAML file. The library is `jpipe` and never imports this."""
