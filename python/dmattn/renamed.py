"""Old names of arguments and attributes: each still works, with a FutureWarning that says the new name."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import warnings
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def renamed(*, into: Callable[..., Any] = dict, **names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A function also takes keyword arguments by their old names: ``@renamed(sink="sink_keys")``.

    A new name "argument.field" says that the old argument is a field of another one now, which ``into(field=value, ...)`` makes.

    The signature that ``inspect`` and type checkers see has the new names alone. While torch traces a call there is no warning, so that an
    old name does not break a graph.

    Args:
        into: makes an argument of fields.
        names: the new name of each old one.

    Returns:
        A decorator of functions and methods; put it below ``@classmethod``.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        order, olds = list(inspect.signature(function).parameters), names.keys()

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if olds.isdisjoint(kwargs):
                return function(*args, **kwargs)
            fields: dict[str, dict[str, Any]] = {}
            for old, new in names.items():
                if old in kwargs:
                    argument, _, field = new.partition(".")
                    given = field in fields.get(argument, ()) or argument in kwargs
                    if given or (argument in order and len(args) > order.index(argument)):
                        raise TypeError(f"{new}, {old}: expected one of them, got both; {old} is the old name of {new}")
                    _warn(old, new)
                    (fields.setdefault(argument, {}) if field else kwargs)[field or new] = kwargs.pop(old)
            return function(*args, **kwargs, **{argument: into(**given) for argument, given in fields.items()})

        return call

    return decorate


class OldName(property):
    """What :func:`renamed_attribute` makes."""


class HidesOldNames:
    """``dir()`` of an instance lists no old names, so that what looks at every attribute, as torch.jit.trace does, causes no warning."""

    def __dir__(self) -> Iterable[str]:
        return [name for name in super().__dir__() if not isinstance(getattr(type(self), name, None), OldName)]


def renamed_attribute(old: str, new: str) -> OldName:
    """A property under the old name of an attribute, for a class that :class:`HidesOldNames`; "attribute.field" for a field of a frozen
    dataclass."""
    attribute, _, field = new.partition(".")

    def get(self: Any) -> Any:
        _warn(old, new)
        return operator.attrgetter(new)(self)

    def put(self: Any, value: Any) -> None:
        _warn(old, new)
        setattr(self, attribute, dataclasses.replace(getattr(self, attribute), **{field: value}) if field else value)

    return OldName(get, put, doc=f"The old name of ``{new}``.")


def with_new_names(saved: dict[str, Any], **names: str) -> dict[str, Any]:
    """A saved state or configuration in which entries with old names have their new ones."""
    return {names.get(name, name): value for name, value in saved.items()}


def _warn(old: str, new: str) -> None:
    if not torch.compiler.is_compiling():
        warnings.warn(f"{old} is called {new} now; the old name will go", FutureWarning, stacklevel=3)
