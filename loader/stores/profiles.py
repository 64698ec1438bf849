"""What the AWS environment variables and files say, by botocore's rules.

botocore's session knows it all, but imports every client that it could build: that takes longer than a whole
first request. So the variables are looked up here, and the files, where there are any, are parsed by
botocore's parser alone.

Ownership: an `AwsProfile` is read once, by the thread that makes it, and constant from then on.
"""

import os
from collections.abc import Mapping
from typing import Any

from loadstone.errors import AccessError
from loadstone.settings import variable

_PROFILE = ("AWS_DEFAULT_PROFILE", "AWS_PROFILE")  # the order is botocore's


class AwsProfile:
    """One profile, and the variables that come before it.

    Parameters
    ----------
    name : str or None
        Its name; ``None``: the one that the environment names, else ``default``.

    Raises
    ------
    AccessError
        A file cannot be parsed, or there is no such profile.
    """

    def __init__(self, name: str | None) -> None:
        self.config_file = variable("AWS_CONFIG_FILE") or "~/.aws/config"
        self.credentials_file = variable("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials"
        self.name = name or next(filter(None, map(variable, _PROFILE)), "")
        self._files = _parsed(self.config_file, self.credentials_file)
        profiles = self._files.get("profiles", {})
        if self.name and self.name not in profiles:
            raise unusable(f"the profile {self.name} is in neither of its files")
        self.values: Mapping[str, Any] = profiles.get(self.name or "default", {})

    def get(self, *variables: str, key: str = "") -> str:
        """Return the first of ``variables`` that is set, else the profile's value for ``key``, or nothing."""
        found = next(filter(None, map(variable, variables)), None)
        return found or str(self.values.get(key) or "")

    def service(self, name: str) -> Mapping[str, Any]:
        """Return what the profile's ``services`` section says of the service ``name``."""
        section = str(self.values.get("services") or "")
        found = self._files.get("services", {}).get(section, {}).get(name, {}) if section else {}
        return found if isinstance(found, dict) else {}


def unusable(reason: object) -> AccessError:
    """Return the error that says why the configuration is of no use."""
    return AccessError(f"the AWS configuration cannot be used: {reason}; correct it, or give key and secret")


def _parsed(config_file: str, credentials_file: str) -> dict[str, Any]:
    """Return what both files say; the profiles of the second are added to those of the first."""
    if not (_exists(config_file) or _exists(credentials_file)):
        return {}
    from botocore.configloader import load_config, raw_config_parse  # noqa: PLC0415  only for what is there
    from botocore.exceptions import BotoCoreError  # noqa: PLC0415

    try:
        config: dict[str, Any] = load_config(config_file) if _exists(config_file) else {"profiles": {}}
        more: dict[str, Any] = raw_config_parse(credentials_file) if _exists(credentials_file) else {}
    except BotoCoreError as error:
        raise unusable(error) from None
    for name, values in more.items():
        config["profiles"][name] = {**config["profiles"].get(name, {}), **values}
    return config


def _exists(path: str) -> bool:
    return os.path.isfile(os.path.expanduser(os.path.expandvars(path)))  # noqa: PTH111, PTH113  as botocore does
