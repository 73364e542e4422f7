"""An optax optimizer applied to each layer separately, and the probe for those that may be."""
