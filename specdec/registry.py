"""Named parts that a third party can add to through a Python entry point."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """Built-in parts by name, then those of an entry-point group, which are loaded when first asked
    for.
    """

    def __init__(self, kind: str, group: str, builtin: Mapping[str, T]) -> None:
        self._kind = kind
        self._group = group
        self._parts = dict(builtin)

    def register(self, name: str, part: T) -> None:
        """Add a part for this process. Raises ValueError if the name is taken."""
        if name in self._parts:
            raise ValueError(f"{self._kind} {name!r} is registered already")
        self._parts[name] = part

    def names(self) -> list[str]:
        """All known names, those of installed plugins included."""
        plugins = {entry.name for entry in entry_points(group=self._group)}
        return sorted(self._parts.keys() | plugins)

    def get(self, name: str) -> T:
        """The part of this name. Raises ValueError naming the nearest, ImportError if a plugin does
        not load.
        """
        if name in self._parts:
            return self._parts[name]
        for entry in entry_points(group=self._group, name=name):
            try:
                self._parts[name] = entry.load()
            except Exception as error:
                raise ImportError(
                    f"{self._kind} {name!r} ({entry.value}) could not be loaded: {error}"
                ) from error
            return self._parts[name]
        known = self.names()
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        raise ValueError(f"no {self._kind} is named {name!r}; {hint}")
