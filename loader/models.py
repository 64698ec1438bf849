"""Loads transformers models whose parameters are views of the checkpoint and wait for their own bytes.

The work of matching a checkpoint to an architecture (class, key conversions, ties, buffers, attention) is
left to transformers' own ``from_pretrained``, which is handed tensors that have not arrived; so the model is
what it would be if it had been loaded the usual way, bit for bit. Nothing is asked of the Hugging Face Hub
and no code from the checkpoint runs.

This module is imported before torch and transformers, which take seconds: bytes flow meanwhile.

Ownership: transformers' log level and progress bars are switched off while any thread loads, under a lock.
"""

import contextlib
import json
import os
import tempfile
import threading
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadstone.errors import BindError, LoadstoneError, MissingExtraError, NotFoundError
from loadstone.loader.checkpoint import Checkpoint, open_checkpoint
from loadstone.settings import Settings

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

    from loadstone.loader.source import Prefetch

# What a model that opened its own checkpoint keeps alive: its pending parameters and its transfers need it.
_OPENED: "weakref.WeakKeyDictionary[PreTrainedModel, tuple[Checkpoint, Prefetch]]" = weakref.WeakKeyDictionary()


def load_model(
    location: "str | os.PathLike[str] | Checkpoint",
    *,
    auto_class: Any = None,
    dtype: "torch.dtype | str | None" = None,
    device: "str | torch.device" = "cpu",
    attn_implementation: str | None = None,
    strict: bool = True,
    wait: bool = False,
    variant: str | None = None,
    cache: str | os.PathLike[str] | None = "auto",
    storage_options: Mapping[str, object] | None = None,
    settings: Settings | None = None,
) -> "PreTrainedModel":
    """Return a transformers model, callable at once, in evaluation mode.

    Its parameters are views of the checkpoint's bytes, ``requires_grad=False``; each waits for its own bytes at
    its first use. Given a location, the bytes start flowing before anything else happens.

    Parameters
    ----------
    location : str, path or Checkpoint
        A folder with a ``config.json``, here or in a store; or a checkpoint that is open already, which the
        caller prefetches and closes.
    auto_class : class, optional
        A transformers class, such as ``AutoModel`` or ``LlamaForCausalLM``. By default the architecture that
        ``config.json`` names.
    dtype : torch.dtype or str, optional
        By default the dtype that the configuration, or else the checkpoint, has. Any other is a converted copy.
    device : str or torch.device
        Where parameters go when their bytes are here; anything but the CPU is a copy.
    attn_implementation : str, optional
        As in ``from_pretrained``.
    strict : bool
        Refuse tensors that the model has no place for. Tensors that the model lacks are always refused.
    wait : bool
        Return only when every byte is here, leaving no pending parameter; needed before code that torch
        functions cannot see: CUDA graph capture, ``torch.export``, an extension in C++.
    variant, cache, storage_options, settings
        As in `open_checkpoint`.

    Raises
    ------
    LoadstoneError
        The checkpoint cannot be opened or does not fit the architecture (`BindError`), or transformers is not
        installed (`MissingExtraError`).
    """
    if not isinstance(location, (str, os.PathLike)):
        return _load(location, auto_class, dtype, device, attn_implementation, strict, wait)
    checkpoint = open_checkpoint(
        location, variant=variant, cache=cache, storage_options=storage_options, settings=settings
    )
    try:
        prefetch = checkpoint.prefetch()
        model = _load(checkpoint, auto_class, dtype, device, attn_implementation, strict, wait)
    except BaseException:
        checkpoint.close()
        raise
    _OPENED[model] = (checkpoint, prefetch)
    return model


def checkpoint_of(model: "PreTrainedModel") -> Checkpoint | None:
    """Return the checkpoint that `load_model` opened for ``model``, or ``None`` when it was given one."""
    opened = _OPENED.get(model)
    return opened[0] if opened else None


def _load(
    checkpoint: Checkpoint,
    auto_class: Any,
    dtype: "torch.dtype | str | None",
    device: "str | torch.device",
    attention: str | None,
    strict: bool,
    wait: bool,
) -> "PreTrainedModel":
    transformers = _transformers()
    from loadstone.loader import deferred, modules  # noqa: PLC0415  both import torch

    where = checkpoint.name
    options = {} if attention is None else {"attn_implementation": attention}
    with _quiet(), _translated(where):
        config, generation = _read_configs(checkpoint)
        factory = _model_class(config, auto_class, where)
        model, info = factory.from_pretrained(
            None,
            config=config,
            state_dict=_tensors(checkpoint),
            dtype=dtype or "auto",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, in one line
            trust_remote_code=False,
            **options,
        )
    assert isinstance(model, transformers.PreTrainedModel)
    _check(info, type(model).__name__, where, strict)
    deferred.finish(model)
    model.requires_grad_(requires_grad=False)
    model.config.name_or_path = model.name_or_path = where
    if generation is not None and model.can_generate():
        model.generation_config = generation
    modules.move(model, device)
    modules.settle_before_fused_paths(model)
    if wait:
        modules.wait_for(model)
    return model


def _transformers() -> Any:
    try:
        import transformers  # noqa: PLC0415  seconds to import, and an extra
    except ImportError as error:
        raise MissingExtraError(
            f"load_model needs transformers ({error}); install loadstone[models], or build the module yourself "
            "and use Checkpoint.bind"
        ) from None
    return transformers


@contextlib.contextmanager
def _translated(where: str) -> Iterator[None]:
    """Give transformers' own refusals in our words, in one line."""
    try:
        yield
    except LoadstoneError:
        raise
    except (ValueError, RuntimeError, OSError, KeyError, AttributeError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise BindError(f"{where}: transformers cannot load this model: {reason[:500]}") from error


def _read_configs(checkpoint: Checkpoint) -> tuple[Any, Any]:
    """Return the model's configuration and its generation configuration, which may be absent.

    transformers reads them from a folder, with all its rules for old files; so they are put into one.
    """
    from transformers import AutoConfig, GenerationConfig  # noqa: PLC0415  as above

    values = checkpoint.config()
    if values is None:
        raise BindError(
            f"{checkpoint.name} has no config.json, which says what model this is; add it, or build the module "
            "yourself and use Checkpoint.bind"
        )
    if values.get("quantization_config"):
        raise BindError(
            f"{checkpoint.name} is quantised, which load_model does not support; use transformers' from_pretrained"
        )
    with tempfile.TemporaryDirectory(prefix="loadstone-") as folder:
        Path(folder, "config.json").write_text(json.dumps(values), encoding="utf-8")
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        try:
            Path(folder, "generation_config.json").write_bytes(checkpoint.read_file("generation_config.json"))
        except NotFoundError:
            # Older models keep these values in config.json.
            return config, GenerationConfig.from_pretrained(
                folder, config_file_name="config.json", _from_model_config=True, local_files_only=True
            )
        return config, GenerationConfig.from_pretrained(folder, local_files_only=True)


def _model_class(config: Any, auto_class: Any, where: str) -> Any:
    import transformers  # noqa: PLC0415  as above

    if auto_class is not None:
        return auto_class
    named = list(config.architectures or ())
    for name in named:
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    if named:
        raise BindError(
            f"{where}: this transformers ({transformers.__version__}) has no {named[0]}, which config.json names; "
            "a newer one may, or pass auto_class=; code inside a checkpoint is never run"
        )
    generates = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    return transformers.AutoModelForCausalLM if generates else transformers.AutoModel


def _tensors(checkpoint: Checkpoint) -> "dict[str, torch.Tensor]":
    """Return every tensor: a view when its bytes are here, else one that will be."""
    import torch  # noqa: PLC0415  after the prefetch has begun

    from loadstone.loader import deferred  # noqa: PLC0415  imports torch
    from loadstone.loader.pending import Arrival  # noqa: PLC0415  imports torch
    from loadstone.loader.views import torch_dtype, torch_shape  # noqa: PLC0415  imports torch

    def arriving(name: str) -> torch.Tensor:
        if checkpoint.is_ready(name):
            return checkpoint[name]
        info = checkpoint.info(name)
        like = torch.empty(torch_shape(info), dtype=torch_dtype(info), device="meta")
        arrival = Arrival(checkpoint, (name,), lambda: checkpoint[name])
        return deferred.deferred(arrival, like, torch.device("cpu"))

    return {name: arriving(name) for name in checkpoint}


def _check(info: Mapping[str, Any], model: str, where: str, strict: bool) -> None:
    """Refuse what does not fit; what the architecture itself lets go is not among these."""
    from loadstone.loader.modules import some  # noqa: PLC0415  imports torch

    problems = []
    if info["missing_keys"]:
        problems.append(f"lacks {len(info['missing_keys'])} tensors ({some(sorted(info['missing_keys']))})")
    if info["mismatched_keys"]:
        shapes = [f"{name} is {list(want)}, stored {list(have)}" for name, have, want in info["mismatched_keys"]]
        problems.append(f"has {len(shapes)} of other shapes ({some(sorted(shapes), '; ')})")
    if strict and info["unexpected_keys"]:
        names = sorted(info["unexpected_keys"])
        problems.append(f"has {len(names)} that the model has no place for ({some(names)})")
    if info.get("error_msgs"):
        problems.append(f"cannot be converted ({some(list(info['error_msgs']), '; ')})")
    if problems:
        raise BindError(
            f"{where} does not fit {model}: it {' and '.join(problems)}; check config.json, or pass auto_class= "
            "for another head, or strict=False to leave tensors out"
        )


def computes_buffers(module: "nn.Module") -> bool:
    """Say whether `compute_buffers` knows how to give ``module`` the buffers that no checkpoint stores."""
    try:
        from transformers import PreTrainedModel  # noqa: PLC0415  an extra
    except ImportError:
        return False
    return isinstance(module, PreTrainedModel)


def compute_buffers(model: "nn.Module") -> None:
    """Compute buffers on the meta device that no checkpoint stores, such as rotary frequencies, as transformers does."""
    import torch  # noqa: PLC0415  not at import, see the module's docstring
    from transformers import PreTrainedModel  # noqa: PLC0415  an extra

    from loadstone.loader.modules import unstored_meta_buffers  # noqa: PLC0415  imports torch

    for tensor in (*model.parameters(), *model.buffers()):
        tensor._is_hf_initialized = True  # type: ignore[union-attr]  # transformers' own mark: leave this one alone
    owners: dict[int, PreTrainedModel] = {}
    for child in model.modules():
        for part in child.modules():
            if isinstance(child, PreTrainedModel):
                owners[id(part)] = child  # modules come outermost first, so the closest model wins
    affected = {}
    for name, child in list(unstored_meta_buffers(model)):
        attribute = name.rpartition(".")[2]
        child._buffers[attribute] = torch.empty_like(child._buffers[attribute], device="cpu")  # type: ignore[arg-type]  # it has one
        affected[id(child)] = child
    with torch.no_grad():
        for key, child in affected.items():
            owners[key]._init_weights(child)


_quiet_lock = threading.Lock()
_quiet_depth = 0
_quiet_before: tuple[int, bool] = (0, False)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from printing a progress bar and a report, which `_check` replaces."""
    from transformers.utils import logging  # noqa: PLC0415  an extra

    global _quiet_depth, _quiet_before  # noqa: PLW0603  the state it guards is global too
    with _quiet_lock:
        if _quiet_depth == 0:
            _quiet_before = (logging.get_verbosity(), logging.is_progress_bar_enabled())
            logging.set_verbosity_error()
            logging.disable_progress_bar()
        _quiet_depth += 1
    try:
        yield
    finally:
        with _quiet_lock:
            _quiet_depth -= 1
            if _quiet_depth == 0:
                logging.set_verbosity(_quiet_before[0])
                if _quiet_before[1]:
                    logging.enable_progress_bar()
