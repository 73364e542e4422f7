"""`jpipe launch`: start, watch, restart and end several processes on this machine."""
