"""The application: train a language model, or a model of one's own, through a pipeline, from a YAML file. `jpipe` never imports this."""
