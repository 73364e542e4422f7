"""The fixtures of training tests, for the tests of language models."""

from tests.train.conftest import interruptible, no_report, text, tiny  # noqa: F401
