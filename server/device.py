"""Whether the device to compute on can be there: asked before torch is imported, which takes seconds.

What is certain without torch is refused at once; the rest is torch's to say, as soon as it is imported.
"""

import ctypes
import importlib.util
import runpy
from pathlib import Path

from loadstone.errors import SettingsError

_DRIVER = "libcuda.so.1"
_NODE = Path("/dev/nvidiactl")


def refuse_absent(device: str) -> None:
    """Refuse a CUDA device where the installed torch has no CUDA, or the machine no driver for it.

    Raises
    ------
    SettingsError
        It cannot be there.
    """
    if device.partition(":")[0] != "cuda":
        return
    build = _torch_build()
    if not build or build.get("hip"):  # AMD's devices are called cuda too
        return
    if not build.get("cuda"):
        raise SettingsError(
            f"device {device!r} is not there: torch {build.get('__version__', '')} is built without CUDA; "
            "install one that has it, or use 'cpu'"
        )
    if not _NODE.exists() and not _loads(_DRIVER):
        raise SettingsError(
            f"device {device!r} is not there: this machine has no CUDA driver ({_DRIVER}); use 'cpu'"
        )


def _torch_build() -> dict[str, object]:
    """Return what torch's own ``version.py`` says, which imports nothing; nothing where there is none."""
    spec = importlib.util.find_spec("torch")
    folders = (spec.submodule_search_locations if spec else None) or ()
    files = [path for folder in folders if (path := Path(folder, "version.py")).is_file()]
    return runpy.run_path(str(files[0])) if files else {}


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
