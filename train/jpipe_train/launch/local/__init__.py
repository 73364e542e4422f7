"""`jpipe launch`: several processes on this machine, which it starts, watches, starts again and ends."""
