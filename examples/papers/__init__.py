"""The models of the papers of PipeDream and PipeDream-2BW, with their data: code that the configs in configs/papers/ name."""
