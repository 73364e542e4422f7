"""Shared parameters: stages that hold copies of one parameter, such as a tied embedding, update them with the sum of their gradients."""
