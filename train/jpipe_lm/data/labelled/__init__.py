"""Texts with labels, for classification, regression and multiple choice: from rows of files to rows of tokens."""
