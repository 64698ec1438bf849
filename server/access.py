"""Who may load and unload adapters.

With a token, whoever sends it. Without one, only programs on this machine, and only while the service is
bound to loopback. A browser on this machine is not such a program: any page it shows could make it send
requests, so an ``Origin`` header, or a ``Host`` that is no loopback name, is refused. So is a request that a
proxy passed on, since it may come from anywhere.
"""

import hmac
import ipaddress
from collections.abc import Mapping

from loadstone.errors import DeniedError, TokenError

_PASSED_ON = ("forwarded", "via", "x-forwarded-for", "x-real-ip")


def is_loopback(host: str) -> bool:
    """Say whether ``host``, a name or an address, can only be this machine."""
    name = host.strip("[]").lower()
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def check_admin(headers: Mapping[str, str], client: str | None, token: str, *, local_only: bool) -> None:
    """Raise unless a request may change what is served.

    Parameters
    ----------
    headers : mapping
        The request's, by names in lower case.
    client : str, optional
        The address at the other end of the connection.
    token : str
        The configured admin token, or an empty string.
    local_only : bool
        The service is bound to a loopback address.

    Raises
    ------
    TokenError
        A token is configured, and this is not it.
    DeniedError
        No token is configured, and the request may come from elsewhere.
    """
    if token:
        _check_token(headers.get("authorization", ""), token)
    elif not local_only:
        raise DeniedError(
            "adapters cannot be changed here: the service is open to other machines and has no admin "
            "token; set LOADSTONE_ADMIN_TOKEN, or bind to 127.0.0.1"
        )
    else:
        _check_local(headers, client)


def _check_token(authorization: str, token: str) -> None:
    scheme, _, sent = authorization.partition(" ")
    if scheme.lower() != "bearer" or not sent:
        raise TokenError("the admin token is missing; send 'Authorization: Bearer TOKEN'")
    if not hmac.compare_digest(sent.strip().encode("latin-1", "replace"), token.encode()):
        raise TokenError("the admin token is wrong; send the one in the service's LOADSTONE_ADMIN_TOKEN")


def _check_local(headers: Mapping[str, str], client: str | None) -> None:
    advice = "without an admin token only programs on this machine may; set LOADSTONE_ADMIN_TOKEN"
    if client is None or not is_loopback(client):
        raise DeniedError(f"the request comes from {client}; {advice}")
    if "origin" in headers:
        raise DeniedError(f"the request comes from a web page in a browser; {advice}")
    if any(name in headers for name in _PASSED_ON):
        raise DeniedError(f"the request was passed on by a proxy; {advice}")
    if not is_loopback(_host_name(headers.get("host", ""))):
        raise DeniedError(f"the request is for the host {headers.get('host', '')!r:.80}; {advice}")


def _host_name(host: str) -> str:
    return host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]
