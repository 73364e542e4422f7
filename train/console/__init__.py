"""What a person sees of a run, and the signals a person sends it."""
