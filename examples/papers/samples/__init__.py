"""Small generated data sets, to try each kind of data offline: `python -m examples.papers.samples NAME`."""
