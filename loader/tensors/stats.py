"""What reading a checkpoint has cost."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stats:
    """What reading has cost in copies so far.

    Attributes
    ----------
    copied_tensors, copied_bytes : int
        Tensors that were read and could not be views because their data is not aligned, and their bytes.
    """

    copied_tensors: int
    copied_bytes: int
