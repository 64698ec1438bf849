"""The short way to a transformers model whose stored names are its own: build it on meta and bind it.

transformers' own loading first prepares the rules by which 260 families of models rename and convert what
they stored under earlier names; that alone takes longer than everything else. Families that have no such
rules do not need it, provided that every name, shape and dtype in the checkpoint is the model's own.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._device import DeviceContext
from transformers import conversion_mapping

from loadstone.errors import BindError
from loadstone.loader.format.gcpause import paused_gc
from loadstone.loader.modules.bind import bind
from loadstone.loader.modules.families import PLAIN
from loadstone.loader.tensors.views import torch_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from loadstone.loader.checkpoint import Checkpoint

_OBJECTS = 5000  # bytes, about, of the Python objects that a model has for each of its tensors


def bound_model(
    model_class: Any, config: Any, checkpoint: "Checkpoint", options: dict[str, Any]
) -> "PreTrainedModel | None":
    """Return the model, or ``None`` when it has to be loaded the long way.

    Parameters
    ----------
    model_class, config
        What to build.
    checkpoint : Checkpoint
        Its tensors.
    options : dict
        More arguments of ``from_pretrained``, ``dtype`` among them.
    """
    registered = conversion_mapping.USER_REGISTERED_MAPPINGS
    if config.model_type not in PLAIN or {config.model_type, model_class.__name__} & registered:
        return None
    dtype = _dtype(config, options["dtype"])
    stored = {torch_dtype(checkpoint.info(name)) for name in checkpoint}
    if dtype is None or any(kind.is_floating_point and kind != dtype for kind in stored):
        return None
    with paused_gc(_OBJECTS * len(checkpoint)):
        with OnlyShapes():
            model: PreTrainedModel = model_class._from_config(config, **{**options, "dtype": dtype})
        try:
            bind(model, checkpoint)
        except BindError:
            return None
    model.train(mode=False)
    return model


class OnlyShapes(DeviceContext):
    """Makes tensors on the meta device, and skips filling them, which takes most of the time of building.

    One mode for both: torch asks every mode about every call. Each function of ``nn.init`` has to be stopped
    itself: what it calls is no longer seen here.
    """

    _FILLS = frozenset(
        {
            *(torch.Tensor.uniform_, torch.Tensor.normal_, torch.Tensor.fill_, torch.Tensor.zero_),
            *(nn.init.uniform_, nn.init.normal_, nn.init.constant_, nn.init.kaiming_uniform_),
        }
    )

    _on_meta: Any = DeviceContext.__torch_function__

    def __init__(self) -> None:
        super().__init__("meta")

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in self._FILLS:
            tensor: torch.Tensor = args[0] if args else (kwargs or {})["tensor"]
            if tensor.is_meta:
                return tensor
        return self._on_meta(func, types, args, kwargs)


def _dtype(config: Any, wanted: "torch.dtype | str") -> torch.dtype | None:
    """Return the dtype to build in, ``None`` when only the tensors can tell."""
    if wanted == "auto":
        wanted = config.dtype
    if isinstance(wanted, str):
        wanted = getattr(torch, wanted, "")
    return wanted if isinstance(wanted, torch.dtype) else None
