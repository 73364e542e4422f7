"""The models of the PipeDream and PipeDream-2BW papers with their data, as code that the configs in configs/papers/ name."""
