"""Where the initial parameters of a run come from: weight files, Orbax checkpoints, and the names of parameters in them."""
