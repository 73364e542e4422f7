"""Mix the rows of several sources of data in proportion to their weights."""

from jpipe_train.data.mixture.mixed import Joined, Mixed, proportions

__all__ = ["Joined", "Mixed", "proportions"]
