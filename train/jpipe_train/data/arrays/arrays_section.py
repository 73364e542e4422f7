"""The section `data` of a config for arrays."""

import reprlib
from collections import Counter
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import BeforeValidator, model_validator

from jpipe_train.config.data_section import DataSection

if TYPE_CHECKING:
    import jpipe_train.config.config
    import jpipe_train.data.data

_LONGEST_NAME, _MOST_COLUMNS = 256, 10**5


def _checked_columns(names: object) -> object:
    if not isinstance(names, list):
        _check_name(names)
        return names
    if not 1 <= len(names) <= _MOST_COLUMNS:
        raise ValueError(f"expected the name of a column, or a list of 1 to {_MOST_COLUMNS:,} names, found {len(names):,} names")
    for name in names:
        _check_name(name)
    if twice := next((name for name, number in Counter(names).items() if number > 1), None):
        raise ValueError(f"expected each column once, found '{twice}' twice; remove one of them")
    return names


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        found = reprlib.repr(name)
        advice = f"write '{found}'" if isinstance(name, int | float) and not isinstance(name, bool) else "put the name in quotes"
        raise ValueError(f"expected names of columns as text, found {found}; {advice}")
    if not 1 <= len(name) <= _LONGEST_NAME:
        raise ValueError(f"expected names of columns of 1 to {_LONGEST_NAME} characters, found {reprlib.repr(name)}")


_Columns = Annotated[str | list[str], BeforeValidator(_checked_columns)]


class ArraysConfig(DataSection):
    """Arrays for a model of your own. They are rows of numbers in JSON lines, CSV, TSV, Parquet or Arrow files, or in NumPy files.

    `inputs_key` and `targets_key` name a column, a list of columns, or, in NumPy files, an array.
    """

    content: ClassVar[str] = "numbers"

    inputs_key: _Columns = "inputs"
    targets_key: _Columns = "targets"

    def read_examples(self, config: "jpipe_train.config.config.Config", path: str | None = None) -> "jpipe_train.data.data.Examples":
        """Read the rows of the arrays."""
        from jpipe_train.data.arrays import read_arrays

        return read_arrays.read(config, path)

    def check_files(self, config: "jpipe_train.config.config.Config", path: str | None = None) -> None:
        """Check the files, without reading them."""
        from jpipe_train.data import sources

        sources.check_rows(self, path)

    @model_validator(mode="after")
    def _has_a_path(self) -> "ArraysConfig":
        if self.first_path is None:
            raise ValueError("format arrays needs path; set path to files with rows of numbers, such as Parquet or CSV, or to NumPy files")
        return self
