"""Texts with labels, for classification, regression and multiple choice. Rows of files become rows of tokens."""
