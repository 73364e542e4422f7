"""What runs programs on devices: the interpreter, its state, transport, metrics, traces and snapshots."""
