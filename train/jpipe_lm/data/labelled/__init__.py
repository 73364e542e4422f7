"""Texts with labels, for classification, regression and multiple choice: from rows of files to rows of tokens."""

from jpipe_lm.data.labelled.reading import Labelled, read
from jpipe_lm.data.labelled.rows import Examples

__all__ = ["Examples", "Labelled", "read"]
