"""The built-in models, each a `jpipe.LayerStack` of Flax NNX layers."""
