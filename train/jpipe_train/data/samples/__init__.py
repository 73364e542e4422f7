"""Small generated data sets, to try each kind of data offline: `jpipe data make`."""
