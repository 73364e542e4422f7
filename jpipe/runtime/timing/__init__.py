"""Measurements of what the runtime moves: beside a computation, and in traces."""
