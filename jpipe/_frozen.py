"""An immutable, hashable mapping, for the fields of plans."""

from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class FrozenMapping(Mapping[str, Value], Generic[Value]):
    """An immutable mapping from names to values; equality and hash depend on the order of the items.

    Args:
        items: a mapping with values that can be hashed.
    """

    def __init__(self, items: Mapping[str, Value]) -> None:
        self._items = dict(items)

    def __getitem__(self, name: str) -> Value:
        return self._items[name]

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Mapping) and tuple(self._items.items()) == tuple(other.items())

    def __hash__(self) -> int:
        return hash(tuple(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


NOTHING: FrozenMapping[Any] = FrozenMapping({})
