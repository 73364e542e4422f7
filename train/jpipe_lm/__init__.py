"""Language models for `jpipe_train`: models, experts, adapters, Hugging Face's layout, text data and generation."""
