"""The model as data: layers and their specs, the stack, adapters for Flax modules and functions, optimizers layer by layer."""
