"""What transformers knows about a checkpoint: its configuration, its class, and its computed buffers.

Nothing here asks the Hugging Face Hub, and code inside a checkpoint is never run. Imports transformers.

Ownership: transformers' log level and progress bars are process-wide; a lock guards switching them.
"""

import contextlib
import copy
import json
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers.utils import logging

from loadstone.errors import BindError, LoadstoneError, NotFoundError
from loadstone.loader.modules.bind import Modules, unstored_meta_buffers

if TYPE_CHECKING:
    from loadstone.loader.checkpoint import Checkpoint

_SPECIAL_FLOAT = '"__float__"'  # how transformers writes infinity and NaN, and only its own reader reads them
_REASON = 500  # most characters of another library's error that are worth repeating


def read_configs(checkpoint: "Checkpoint") -> tuple[Any, Any]:
    """Return the model's configuration and its generation configuration.

    Raises
    ------
    BindError
        There is no ``config.json``, or the weights are quantised.
    """
    values = checkpoint.config()
    if values is None:
        raise BindError(
            f"{checkpoint.name} has no config.json, which says what model this is; add it, or build the "
            "module yourself and use Checkpoint.bind"
        )
    if values.get("quantization_config"):
        raise BindError(
            f"{checkpoint.name} is quantised, which load_model does not support; use transformers' own "
            "from_pretrained"
        )
    generation = _generation_config(checkpoint, values)
    config_class = _plain_config_class(values)
    if config_class is not None:
        return config_class(**copy.deepcopy(values)), generation
    with _folder("config.json", json.dumps(values).encode()) as folder:
        read = transformers.AutoConfig.from_pretrained
        return read(folder, local_files_only=True, trust_remote_code=False), generation


def _plain_config_class(values: Mapping[str, Any]) -> Any:
    """Return the class that takes ``values`` as they are; ``None`` where transformers has more rules.

    Those rules need a folder, and to write down what they found takes longer than everything else here.
    """
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        return None
    if "configuration_files" in values or (kind == "mistral" and "layer_types" in values):
        return None
    if _SPECIAL_FLOAT in json.dumps(values):
        return None
    config_class = transformers.CONFIG_MAPPING[kind]
    usual = transformers.PreTrainedConfig.from_dict
    return config_class if config_class.from_dict.__func__ is usual.__func__ else None  # type: ignore[attr-defined]  # a class method


def _generation_config(checkpoint: "Checkpoint", values: Mapping[str, Any]) -> Any:
    generation: Any = transformers.GenerationConfig
    try:
        data = checkpoint.read_file("generation_config.json")
    except NotFoundError:
        # Older models keep these values in config.json.
        return generation.from_model_config(copy.deepcopy(values))
    with _folder("generation_config.json", data) as folder:
        return generation.from_pretrained(folder, local_files_only=True)


@contextlib.contextmanager
def _folder(name: str, data: bytes) -> Iterator[str]:
    """Put a file into a folder of its own for a while: transformers reads only from folders."""
    with tempfile.TemporaryDirectory(prefix="loadstone-") as folder:
        Path(folder, name).write_bytes(data)
        yield folder


def model_class(config: Any, chosen: Any, where: str) -> tuple[Any, Any]:
    """Return the transformers class to make, and the configuration to make it with.

    Parameters
    ----------
    config : PretrainedConfig
        What ``config.json`` says.
    chosen : class or None
        A model's class, an ``Auto…`` class, or ``None`` for the class that the configuration names.
    where : str
        The checkpoint's name, for messages.

    Raises
    ------
    BindError
        This version of transformers has no such class.
    """
    names = list(config.architectures or ())
    if chosen is None:
        chosen = _named_class(names)
    if chosen is None and names:
        raise BindError(
            f"{where}: transformers {transformers.__version__} has no {names[0]}, which config.json names; a "
            "newer one may, or pass auto_class=; code inside a checkpoint is never run"
        )
    if chosen is None:
        generates = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        chosen = transformers.AutoModelForCausalLM if generates else transformers.AutoModel
    return _resolved(chosen, config, names, where)


def _named_class(names: Sequence[str]) -> Any:
    for name in names:
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    return None


def _resolved(chosen: Any, config: Any, names: Sequence[str], where: str) -> tuple[Any, Any]:
    """Look an ``Auto…`` class up, as its own ``from_pretrained`` does, which wants a folder or a Hub name."""
    if issubclass(chosen, transformers.PreTrainedModel):
        return chosen, config
    found = chosen._model_mapping.get(type(config), None)
    if found is None:
        raise BindError(
            f"{where}: {chosen.__name__} has no class for {type(config).__name__}; pass another one"
        )
    if isinstance(found, (tuple, list)):
        found = next((one for one in found if one.__name__ in names), found[0])
    text_config = config.sub_configs.get("text_config")
    if text_config is not None and found.config_class is text_config:
        config = config.get_text_config()  # the text half of a model that also sees
    return found, config


def computes_buffers(module: nn.Module) -> bool:
    """Say whether `compute_buffers` can give ``module`` the buffers that no checkpoint stores."""
    return isinstance(module, transformers.PreTrainedModel)


def compute_buffers(model: nn.Module, modules: Modules) -> None:
    """Compute the buffers on the meta device that no checkpoint stores, such as rotary frequencies.

    transformers does it while it gives random values to what was not loaded; everything else is marked as
    loaded, so that only those buffers change.

    Parameters
    ----------
    model : PreTrainedModel
        The whole model.
    modules : sequence of (str, nn.Module)
        It and all modules below it, by name.
    """
    for _, child in modules:
        tensors: tuple[Any, ...] = (*child._parameters.values(), *child._buffers.values())
        for tensor in tensors:
            if tensor is not None:
                tensor._is_hf_initialized = True
    affected: dict[str, nn.Module] = {}
    for name, child in unstored_meta_buffers(modules).items():
        path, _, attribute = name.rpartition(".")
        child._buffers[attribute] = torch.empty_like(child.get_buffer(attribute), device="cpu")
        affected[path] = child
    with torch.no_grad():
        for path, child in affected.items():
            _owner(model, path)._init_weights(child)


def _owner(model: nn.Module, path: str) -> Any:
    """Return the closest transformers model that holds the module at ``path``, which may be that module."""
    owner = child = model
    for part in path.split(".") if path else ():
        child = child.get_submodule(part)
        if isinstance(child, transformers.PreTrainedModel):
            owner = child
    return owner


@contextlib.contextmanager
def translated(where: str) -> Iterator[None]:
    """Give transformers' own refusals in one line, as a `BindError`."""
    try:
        yield
    except LoadstoneError:
        raise
    except Exception as error:  # of any class: a configuration may be wrong in any way
        reason = " ".join(str(error).split())[:_REASON]
        raise BindError(f"{where}: transformers cannot load this model: {reason}") from error


_logging: Any = logging
_quiet_lock = threading.Lock()
_quiet_threads: list[tuple[int, bool]] = []


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from printing progress bars and its report of names that do not fit."""
    with _quiet_lock:
        if not _quiet_threads:
            before = (_logging.get_verbosity(), _logging.is_progress_bar_enabled())
            _logging.set_verbosity_error()
            _logging.disable_progress_bar()
        else:
            before = _quiet_threads[0]
        _quiet_threads.append(before)
    try:
        yield
    finally:
        with _quiet_lock:
            verbosity, bars = _quiet_threads.pop()
            if not _quiet_threads:
                _logging.set_verbosity(verbosity)
                if bars:
                    _logging.enable_progress_bar()
