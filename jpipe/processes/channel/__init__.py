"""The channel between the processes of a run: messages, decisions of process 0, heartbeats, and what processes wait for."""
