"""``loadstone serve``: bind, let bytes flow, answer; stop when told to, after the running requests.

The order is the point. The port is bound and the transfer begun before anything heavy is imported; uvicorn
and FastAPI are imported while the first bytes come; torch only once ``/health`` answers.
"""

import errno
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from loadstone.errors import MissingExtraError, SettingsError
from loadstone.server.engine import Engine
from loadstone.server.startup import Startup
from loadstone.server.timeline import Timeline
from loadstone.settings import Settings

_DESCRIPTORS = 65536


def serve(
    location: str,
    *,
    adapters: Sequence[str] = (),
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    cache: str | None = "auto",
    storage_options: Mapping[str, object] | None = None,
    settings: Settings | None = None,
    announce: Callable[[str, Engine], None] | None = None,
) -> int:
    """Serve a model until SIGTERM or SIGINT; return 0 then.

    Parameters
    ----------
    location : str
        The base model's folder, local or in a store.
    adapters : sequence of str
        Roots that adapters may be loaded from.
    host, port : str, int
        Where to listen; port 0 takes any free one.
    name : str, optional
        What requests call the base; by default its folder's name.
    announce : callable, optional
        Called with the service's URL and engine as soon as it answers on its port.

    Raises
    ------
    LoadstoneError
        The port cannot be had, or the model cannot be loaded.
    """
    timeline = Timeline()
    timeline.mark("serve")
    _allow_descriptors()
    settings = Settings.from_env() if settings is None else settings
    startup = Startup(
        location,
        settings=settings,
        roots=adapters,
        name=name,
        timeline=timeline,
        hold=True,
        cache=cache,
        storage_options=storage_options,
    )
    with _bind(host, port) as bound, _signals() as stop:
        engine = Engine(startup, settings)
        engine.start()
        try:
            _serve(engine, settings, bound, stop, announce)
        finally:
            engine.close()
        if engine.error is not None:
            raise engine.error
    return 0


def _allow_descriptors() -> None:
    """Raise the soft limit on open files as far as is allowed: every connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _serve(
    engine: Engine,
    settings: Settings,
    bound: socket.socket,
    stop: "_Stop",
    announce: Callable[[str, Engine], None] | None,
) -> None:
    try:
        from loadstone.server.listen import Server  # noqa: PLC0415  bytes flow while this is imported
    except ImportError as error:
        raise MissingExtraError(
            f"the service needs {error.name}; install it with: pip install 'loadstone[serve]'"
        ) from error

    if engine.state == "failed":
        return

    def listening() -> None:
        engine.startup.timeline.mark("listening")
        engine.startup.release()
        if announce is not None:
            announce(_url(bound), engine)

    server = Server(engine, settings, bound, listening)

    def end() -> None:
        server.should_exit = True

    engine.on_failure(end)
    stop.call(end)
    server.run([bound])


class _Stop:
    """A wish to stop, which may come before there is anything to stop."""

    def __init__(self) -> None:
        self._wished = False
        self._action: Callable[[], None] | None = None

    def call(self, action: Callable[[], None]) -> None:
        """Have ``action`` called when the wish comes, or now."""
        self._action = action
        if self._wished:
            action()

    def __call__(self, _signal: int, _frame: FrameType | None) -> None:
        self._wished = True
        if self._action is not None:
            self._action()


@contextmanager
def _signals() -> Iterator[_Stop]:
    """Take SIGTERM and SIGINT as a wish to stop: before uvicorn takes them, and after."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _bind(host: str, port: int) -> Iterator[socket.socket]:
    """Listen at once: who connects before the server runs waits a moment instead of being refused."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:  # a name may have no form that the network knows
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise SettingsError(
            f"{host!r:.100} is not an address to listen on ({reason}); check --host"
        ) from None
    with bound:
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(1024)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                advice = (
                    "it is no address of this machine; choose another --host, such as 127.0.0.1 or 0.0.0.0"
                )
            else:
                advice = "choose another --port, or 0 for any"
            raise SettingsError(f"cannot listen on {host}:{port} ({error.strerror}); {advice}") from None
        yield bound


def _url(bound: socket.socket) -> str:
    address, port = bound.getsockname()[:2]
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
