"""`jpipe doctor`: check what a job would find on its hosts, and what to change before it starts."""
