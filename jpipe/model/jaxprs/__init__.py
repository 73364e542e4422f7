"""Analyses and transformations of jaxprs: dependence, evaluation in part, cuts, mixed rows, constants."""
