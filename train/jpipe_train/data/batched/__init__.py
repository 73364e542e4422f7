"""From what was read to batches: rows of documents, their order, and checks of how much there is."""
