"""Language models for `jpipe_train`: models, experts and adapters, Hugging Face's layout, text as data, generation."""
