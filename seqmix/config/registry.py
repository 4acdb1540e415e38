# SPDX-License-Identifier: Apache-2.0
"""The configurables: frozen dataclasses under a gin name, checked whenever they are constructed."""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from seqmix.config.coerce import Mismatch, coerce
from seqmix.config.errors import ConfigError

_classes: dict[str, type] = {}
_names: dict[type, str] = {}
_hints: dict[type, dict[str, Any]] = {}

# What a config was constructed from, and in which scope. Kept on the instance, outside its fields:
# equality, hashing, `replace` and `asdict` do not see it.
GIVEN = "_config_given"
SCOPE = "_config_scope"


@dataclasses.dataclass(frozen=True)
class Child:
    """One config that another derives from its own values.

    A configurable class with derived children has a classmethod
    ``gin_children(cls, values: Mapping[str, Any])`` that gets the values of its fields and returns
    the children (an iterable of `Child`, or a mapping to them). The builder builds each and passes
    them as ``{field: {key: built, ...}}``.

    Attributes:
      field: The field of the parent, a mapping, that holds the child.
      key: The child's key in that mapping.
      config: The child's registered class.
      scope: The scope its bindings come from, inside the scope of its parent; empty for the
        parent's own.
    """

    field: str
    key: str
    config: type
    scope: str = ""


def configurable[C](name: str | type[C] | None = None) -> Any:
    """Registers a frozen dataclass as a configurable and checks its fields' types on construction.

    Used above the dataclass decorator::

        @config.configurable("HybridLM")
        @dataclasses.dataclass(frozen=True)
        class HybridLMConfig: ...

    Args:
      name: The gin name; without it the class's name less a trailing ``Config``.

    Raises:
      TypeError: If the class is no frozen dataclass, or has ``__slots__``.
      ValueError: If another class has the name.
    """
    if isinstance(name, type):
        return _register(name, None)
    return functools.partial(_register, name=name)


def _register[C](cls: type[C], name: str | None) -> type[C]:
    name = name or cls.__name__.removesuffix("Config")
    if not dataclasses.is_dataclass(cls) or not cls.__dataclass_params__.frozen:
        raise TypeError(f"{cls.__qualname__} must be a dataclass(frozen=True) to be configurable")
    if "__slots__" in cls.__dict__:
        raise TypeError(f"{cls.__qualname__} must not have __slots__ to be configurable")
    if not name.isidentifier():
        raise ValueError(f"{name!r} is no name for a configurable: an identifier is expected")
    other = _classes.get(name)
    # A module that is loaded again defines its classes again.
    if other and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(
            f"the name {name!r} of {cls.__module__}.{cls.__qualname__} is taken by "
            f"{other.__module__}.{other.__qualname__}"
        )
    if "__init__" in cls.__dict__:
        cls.__init__ = _checked(cls, cls.__init__)
    _classes[name], _names[cls] = cls, name
    return cls


def _checked(cls: type, init: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(init)

    @functools.wraps(init)
    def checked_init(self, *args: Any, **kwargs: Any) -> None:
        given = dict(signature.bind(self, *args, **kwargs).arguments)
        del given[next(iter(signature.parameters))]
        values = {
            field.name: check_field(cls, field.name, value)
            for field in init_fields(cls)
            if (value := given.get(field.name, field_default(field))) is not dataclasses.MISSING
        }
        object.__setattr__(self, GIVEN, {key: values[key] for key in given})
        init(self, **values)

    return checked_init


def init_fields(cls: type) -> list[dataclasses.Field]:
    """Returns the fields a config file can bind."""
    return [field for field in dataclasses.fields(cls) if field.init]


def field_default(field: dataclasses.Field) -> Any:
    """Returns the field's default, made anew, or ``dataclasses.MISSING``."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def check_field(cls: type, field: str, value: Any) -> Any:
    """Returns `value` as the field's annotation wants it.

    Raises:
      ConfigError: If the annotation does not allow it.
    """
    try:
        return coerce(value, field_types(cls)[field], f"{gin_name(cls)}.{field}", class_name)
    except Mismatch as mismatch:
        raise ConfigError(str(mismatch)) from None


def field_types(cls: type) -> dict[str, Any]:
    """Returns the resolved annotations of a class, string annotations included.

    Raises:
      TypeError: If an annotation names something that does not exist.
    """
    if cls not in _hints:
        try:
            _hints[cls] = typing.get_type_hints(cls)
        except NameError:
            # A class defined in a function: its annotations may name configurables defined beside
            #   it.
            try:
                local = {known.__name__: known for known in _classes.values()}
                _hints[cls] = typing.get_type_hints(cls, localns=local)
            except NameError as error:
                raise TypeError(
                    f"an annotation of {cls.__qualname__} is unknown: {error}"
                ) from error
    return _hints[cls]


def names() -> list[str]:
    """Returns the gin names of all configurables, sorted."""
    return sorted(_classes)


def find(name: str) -> type | None:
    """Returns the class with that gin name."""
    return _classes.get(name)


def gin_name(cls: type) -> str:
    """Returns the gin name of a registered class.

    Raises:
      TypeError: If the class is not registered.
    """
    if cls not in _names:
        raise TypeError(f"{cls.__qualname__} is not configurable: @config.configurable is missing")
    return _names[cls]


def is_registered(cls: Any) -> bool:
    """Tells whether `cls` is a registered class."""
    return isinstance(cls, type) and cls in _names


def class_name(cls: type) -> str:
    """Returns the name of any class as messages show it: a configurable by its gin name."""
    return _names.get(cls, cls.__name__)


def children(cls: type, values: Mapping[str, Any]) -> list[Child]:
    """Returns the children that a class derives from the values of its fields."""
    hook = getattr(cls, "gin_children", None)
    if hook is None:
        return []
    found: Iterable[Child] | Mapping[Any, Child] = hook(values)
    return list(found.values() if isinstance(found, Mapping) else found)
