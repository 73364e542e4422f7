"""Compressed messages: arrays are rounded to fewer bits before they are sent, between stages and between replicas (`Plan.links`)."""
