"""The fixtures of data tests, for the tests of preferences."""

from tests.lm.data.conftest import tokenizer, tokenizer_files  # noqa: F401
