"""Loads transformers models whose parameters are views of the checkpoint and wait for their own bytes.

The work of matching a checkpoint to an architecture (key conversions, ties, buffers, attention) is left to
transformers' own ``from_pretrained``, which is handed tensors that have not arrived; so the model is what it
would be if it had been loaded the usual way, bit for bit.

Importing this module imports neither torch nor transformers, which takes seconds: bytes flow meanwhile.

Ownership: the table of checkpoints opened here is only added to; an entry goes with its model.
"""

import os
import sys
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from loadstone.errors import BindError, MissingExtraError
from loadstone.loader.checkpoint import Checkpoint, open_checkpoint
from loadstone.loader.modules.arrived import arrived
from loadstone.settings import Settings

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from loadstone.loader.source import Prefetch

# What a model whose checkpoint was opened here keeps alive: its pending parameters and the transfer need it.
_OPENED: "weakref.WeakKeyDictionary[PreTrainedModel, tuple[Checkpoint, Prefetch]]" = (
    weakref.WeakKeyDictionary()
)


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

    Its parameters are views of the checkpoint's bytes, with ``requires_grad=False``; each waits for its own
    bytes at its first use. Given a location, the bytes start flowing before anything else happens. Results
    are those of ``from_pretrained(…).requires_grad_(False)``.

    Parameters
    ----------
    location : str, path or Checkpoint
        A folder with a ``config.json``, here or in a store; or a checkpoint that is open already, which the
        caller prefetches and closes.
    auto_class : class, optional
        A transformers class, such as ``AutoModel`` or ``LlamaForCausalLM``. By default the architecture that
        ``config.json`` names.
    dtype : torch.dtype or str, optional
        By default the dtype of the configuration, or else of the checkpoint. Any other is a converted copy.
    device : str or torch.device
        Where parameters go when their bytes are here; anything but the CPU is a copy.
    attn_implementation : str, optional
        As in ``from_pretrained``.
    strict : bool
        Refuse tensors that the model has no place for. What the model lacks is always refused.
    wait : bool
        Return only when every byte is here, leaving no pending parameter; needed before code that torch
        functions cannot see: ``torch.compile(fullgraph=True)``, ``torch.export``, CUDA graph capture, an
        extension that takes pointers. Anything of the kind fails loudly while bytes are missing.
    variant, cache, storage_options, settings
        As in `open_checkpoint`.

    Raises
    ------
    LoadstoneError
        The checkpoint cannot be opened or does not fit the architecture (`BindError`), the device is not
        here (`SettingsError`), or transformers is not installed (`MissingExtraError`).
    """
    if not isinstance(location, (str, os.PathLike)):
        return _load(
            location, auto_class, dtype, device, attention=attn_implementation, strict=strict, wait=wait
        )
    checkpoint = open_checkpoint(
        location, variant=variant, cache=cache, storage_options=storage_options, settings=settings
    )
    try:
        # While the imports or the network take long, bytes flow; else reading files would slow the building.
        early = "transformers" not in sys.modules or len(arrived(checkpoint, checkpoint)) < len(checkpoint)
        prefetch = checkpoint.prefetch() if early else None
        model = _load(
            checkpoint, auto_class, dtype, device, attention=attn_implementation, strict=strict, wait=wait
        )
        prefetch = prefetch or checkpoint.prefetch()
    except BaseException:
        checkpoint.close()
        raise
    _OPENED[model] = (checkpoint, prefetch)
    return model


def checkpoint_of(model: "PreTrainedModel") -> Checkpoint | None:
    """Return the checkpoint that `load_model` opened for ``model``; ``None`` when it was given one."""
    opened = _OPENED.get(model)
    return opened[0] if opened else None


def _load(
    checkpoint: Checkpoint,
    auto_class: Any,
    dtype: "torch.dtype | str | None",
    device: "str | torch.device",
    *,
    attention: str | None,
    strict: bool,
    wait: bool,
) -> "PreTrainedModel":
    try:
        from loadstone.loader.modules import architectures  # noqa: PLC0415  imports transformers
    except ImportError as error:
        raise MissingExtraError(
            f"load_model needs transformers ({error}); install loadstone[models], or build the module "
            "yourself and use Checkpoint.bind"
        ) from None
    from loadstone.loader.modules import bind, direct  # noqa: PLC0415  as above
    from loadstone.loader.tensors.device import parse_device  # noqa: PLC0415  imports torch

    place = parse_device(device)
    where = checkpoint.name
    options: dict[str, Any] = {"dtype": dtype or "auto"}
    if attention is not None:
        options["attn_implementation"] = attention
    with architectures.quiet(), architectures.translated(where):
        config, generation = architectures.read_configs(checkpoint)
        model_class, config = architectures.model_class(config, auto_class, where)
        model = direct.bound_model(model_class, config, checkpoint, options)
        if model is None:
            model = _converted_model(model_class, config, checkpoint, options, strict=strict)
    model.config.name_or_path = model.name_or_path = where
    if model.can_generate():
        model.generation_config = generation
    if place.type != "cpu":  # where everything is already
        bind.move(model, place)
    if wait:
        bind.wait_for(model)
    return model


def _converted_model(
    model_class: Any, config: Any, checkpoint: Checkpoint, options: dict[str, Any], *, strict: bool
) -> "PreTrainedModel":
    """Load the way transformers does, with its rules for names and formats, from tensors yet to arrive."""
    from loadstone.loader.modules.bind import settle_before_fused_paths  # noqa: PLC0415  imports torch
    from loadstone.loader.modules.deferred import finish  # noqa: PLC0415  imports torch

    model: PreTrainedModel
    model, info = model_class.from_pretrained(
        None,
        config=config,
        state_dict=_tensors(checkpoint),
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are refused below, in one line
        trust_remote_code=False,
        **options,
    )
    _check(info, type(model).__name__, checkpoint.name, strict)
    finish(model)
    model.requires_grad_(requires_grad=False)
    settle_before_fused_paths(model.modules())
    return model


def _tensors(checkpoint: Checkpoint) -> "dict[str, torch.Tensor]":
    """Return every tensor: a view when its bytes are here, else one that will be."""
    import torch  # noqa: PLC0415  see the module's docstring

    from loadstone.loader.modules.deferred import deferred  # noqa: PLC0415  imports torch
    from loadstone.loader.modules.pending import Arrival  # noqa: PLC0415  imports torch
    from loadstone.loader.tensors.views import torch_dtype, torch_shape  # noqa: PLC0415  imports torch

    ready = checkpoint.get(arrived(checkpoint, checkpoint))

    def arriving(name: str) -> torch.Tensor:
        if name in ready:
            return ready[name]
        info = checkpoint.info(name)
        like = torch.empty(torch_shape(info), dtype=torch_dtype(info), device="meta")
        return deferred(Arrival(checkpoint, (name,), lambda: checkpoint[name]), like, torch.device("cpu"))

    return {name: arriving(name) for name in checkpoint}


def _check(info: Mapping[str, Any], model: str, where: str, strict: bool) -> None:
    """Refuse what does not fit; names that the architecture itself lets go are not among these."""
    from loadstone.loader.modules.bind import some  # noqa: PLC0415  imports torch

    problems = []
    missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    shapes = [f"{name} is {list(want)}, stored {list(have)}" for name, have, want in info["mismatched_keys"]]
    if missing:
        problems.append(f"lacks {len(missing)} tensors ({some(missing)})")
    if shapes:
        problems.append(f"has {len(shapes)} of other shapes ({some(sorted(shapes), '; ')})")
    if unexpected and strict:
        problems.append(f"has {len(unexpected)} that the model has no place for ({some(unexpected)})")
    if problems:
        raise BindError(
            f"{where} does not fit {model}: it {' and '.join(problems)}; check config.json, or pass "
            "auto_class= for another head, or strict=False to leave tensors out"
        )
