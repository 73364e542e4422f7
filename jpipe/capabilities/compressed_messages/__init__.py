"""Compressed messages: arrays are rounded to fewer bits where they are sent, between stages and between replicas (`Plan.links`)."""
