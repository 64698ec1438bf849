"""The dtypes of the safetensors format and how many bits an element takes.

The spellings are the format's own. Sub-byte dtypes are packed: a shape counts logical elements, so that an
``F4`` tensor of shape ``[4]`` takes two bytes, and a tensor whose bits do not fill whole bytes is invalid.
"""

from types import MappingProxyType

BITS = MappingProxyType(
    {
        "BOOL": 8,
        "F4": 4,
        "F6_E2M3": 6,
        "F6_E3M2": 6,
        "U8": 8,
        "I8": 8,
        "F8_E5M2": 8,
        "F8_E4M3": 8,
        "F8_E8M0": 8,
        "F8_E4M3FNUZ": 8,
        "F8_E5M2FNUZ": 8,
        "I16": 16,
        "U16": 16,
        "F16": 16,
        "BF16": 16,
        "I32": 32,
        "U32": 32,
        "F32": 32,
        "C64": 64,
        "F64": 64,
        "I64": 64,
        "U64": 64,
    }
)
"""Bits an element takes, by dtype; the same set and spellings as safetensors 0.8."""
