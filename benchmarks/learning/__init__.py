"""Compare how well models learn with weights that are some updates old: plain training, 2BW and PipeDream."""
