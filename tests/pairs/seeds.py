"""The seed of the pairs that are drawn: that of the commit, so that each commit tries others and anyone can repeat them."""

import os

from tests import thinning

VARIABLE = "JPIPE_PAIRS"


def seed() -> tuple[str, str]:
    """Return the seed and where it comes from: the environment, the commit's hash, or a fixed one where there is no Git."""
    if value := os.environ.get(VARIABLE):
        return value, VARIABLE
    if commit := thinning.commit():
        return commit[:12], "the commit's hash"
    return "0", "no Git here"
