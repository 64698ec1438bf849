"""What a transformers model calls its parameters, told without a byte of them. Imports transformers.

A checkpoint may store other names and shapes than the model has, which transformers converts while it loads:
one tensor for each expert that the model holds in one, for example.
"""

from typing import TYPE_CHECKING

import torch

from loadstone.loader.modules import architectures
from loadstone.loader.modules.direct import OnlyShapes

if TYPE_CHECKING:
    from loadstone.loader.checkpoint import Checkpoint


def parameter_shapes(checkpoint: "Checkpoint") -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of the model that `load_model` makes of a checkpoint, by name.

    Raises
    ------
    BindError
        transformers cannot make it.
    """
    where = checkpoint.name
    with architectures.quiet(), architectures.translated(where):
        config, _ = architectures.read_configs(checkpoint)
        model_class, config = architectures.model_class(config, None, where)
        with torch.device("meta"), OnlyShapes():
            model: torch.nn.Module = model_class._from_config(config)
    return {
        name: tuple(parameter.shape) for name, parameter in model.named_parameters(remove_duplicate=False)
    }
