"""Options that a user gives as a dict, such as those of a YAML file."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from lightning_par.errors import ConfigurationError, nearest

__all__ = ["read_fields"]

Options = TypeVar("Options")


def read_fields(kind: type[Options], given: Mapping[str, Any], option: str) -> Options:
    """Build a dataclass from its fields by name.

    Args:
        kind: The dataclass.
        given: Field name -> value; fields without a default have to be there.
        option: Name of the option that the user gave, for messages.

    Raises:
        ConfigurationError: A field does not exist, or is missing.
    """
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    unknown = [name for name in given if name not in known]
    if unknown:
        hint = nearest(unknown[0], known, cutoff=0.6)
        raise ConfigurationError(
            "LP901",
            f"{option} has no field {', '.join(map(repr, unknown))}. Its fields are "
            f"{', '.join(known)}{hint}",
        )
    try:
        return kind(**given)
    except TypeError as error:  # a field without a default
        raise ConfigurationError(
            "LP902", f"{option}={dict(given)!r} is not complete: {error}. Pass the missing fields."
        ) from error
