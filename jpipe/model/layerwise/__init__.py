"""An optax optimizer that is applied to each layer separately, and the probe that checks whether this is possible."""
