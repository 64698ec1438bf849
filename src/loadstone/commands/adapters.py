"""``loadstone adapters …``: a small client of a running service, and the offline check."""

import argparse
import http.client
import json
import sys
import urllib.error
import urllib.request
from typing import Any

from loadstone.commands.common import print_json, settings_of, storage_options_of
from loadstone.display import print_columns
from loadstone.errors import RequestError, TransferError
from loadstone.settings import Settings

TIMEOUT = 600.0
"""Seconds: a load may have to fetch the adapter from a slow store first."""


def call(url: str, body: dict[str, object] | None = None) -> Any:
    """Send a request to a service as JSON and return the answer, decoded; POST when there is a body.

    Raises
    ------
    RequestError
        The service refused; the message is its own.
    TransferError
        Nothing answers there.
    """
    headers = {"Accept": "application/json", "Content-Type": "application/json"}
    token = Settings.from_env().admin_token
    if token:
        headers["Authorization"] = f"Bearer {token}"
    if not url.startswith(("http://", "https://")):
        raise RequestError(f"{url!r} is not the URL of a service; it begins with http:// or https://")
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers=headers)  # noqa: S310  checked just above
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:  # noqa: S310
            return _decode(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            answer = _decode(error.read())
        if isinstance(answer, dict) and isinstance(answer.get("error"), dict):
            raise RequestError(str(answer["error"].get("message")), answer["error"].get("param")) from None
        text = f"{url} answered {error.code}, and not as `loadstone serve` does; check the URL"
        raise RequestError(text) from None
    except (OSError, http.client.HTTPException) as error:
        raise TransferError(
            f"no service answers at {url}: {_reason(error)}; is `loadstone serve` running there?"
        ) from None


def _reason(error: Exception) -> str:
    """Return what is wrong in plain words, without urllib's and errno's wrapping."""
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    return (cause.strerror if isinstance(cause, OSError) else None) or str(cause) or type(cause).__name__


def _decode(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")


def load(args: argparse.Namespace) -> int:
    """Load an adapter into a running service."""
    body = {"lora_name": args.name, "lora_path": args.path or args.name, "load_inplace": args.replace}
    try:
        answer = call(f"{args.url}/v1/load_lora_adapter", body)
    except RequestError as error:
        if error.param == "load_inplace":
            raise RequestError(f"{error} (here: --replace)", error.param) from None
        raise
    _say(args, answer)
    return 0


def unload(args: argparse.Namespace) -> int:
    """Unload an adapter from a running service."""
    _say(args, call(f"{args.url}/v1/unload_lora_adapter", {"lora_name": args.name}))
    return 0


def _say(args: argparse.Namespace, answer: Any) -> None:
    if args.json or not isinstance(answer, dict):
        print_json(answer) if args.json else print(answer)
        return
    for warning in answer.get("warnings", ()):
        print(f"warning: {warning}", file=sys.stderr)
    print(answer.get("message", answer))


def list_adapters(args: argparse.Namespace) -> int:
    """List the models that a running service answers as."""
    answer = call(f"{args.url}/v1/models")
    if args.json:
        print_json(answer)
        return 0
    rows = [
        (model["id"], f"adapter of {model['parent']}" if model.get("parent") else "base", str(model["root"]))
        for model in answer["data"]
    ]
    print_columns(("name", "what", "from"), rows)
    return 0


def check(args: argparse.Namespace) -> int:
    """Check an adapter against its base without a service; the exit status is 1 when it is refused."""
    from loadstone.adapters.check import check_adapter  # imports torch; the other actions need none

    report = check_adapter(
        args.adapter,
        base=args.base,
        strict_base=args.strict_base,
        storage_options=storage_options_of(args),
        settings=settings_of(args),
    )
    if args.json:
        print(report.to_json())
    else:
        for line in report.lines():
            print(line)
    return 0 if report.ok else 1
