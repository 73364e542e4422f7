"""`jpipe plan`, `jpipe simulate` and `--plan auto`."""
