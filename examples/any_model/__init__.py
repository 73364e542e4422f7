"""Whole models that jpipe cuts into layers by itself."""
