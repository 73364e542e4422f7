"""Flat jaxprs: calls inlined, loops over layers unrolled."""
