"""Tests of models and data by name, with a small server of the Hub's API on the loopback interface."""
