"""Stores without an HTTP form, through fsspec."""

from collections.abc import Mapping

from loadstone.errors import LocationError
from loadstone.loader.locations import Location
from loadstone.loader.stores import Store
from loadstone.settings import Settings


def open_generic(location: Location, options: Mapping[str, object], settings: Settings) -> Store:
    """Return the store behind ``location``."""
    raise LocationError(f"{location.text} cannot be read yet")
