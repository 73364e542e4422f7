"""Sources of the parameters that a run begins with: files of weights, Orbax checkpoints, and the names of parameters in them."""
