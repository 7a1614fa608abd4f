"""Element types by name, without torch.

Names are torch's (`bfloat16`, `float8_e4m3fn`): they are what travels on the
wire to vLLM and what a plan stores.
"""

from __future__ import annotations

__all__ = ["ITEMSIZE", "SAFETENSORS", "TRANSFERABLE", "nbytes"]

#: Bytes of one element.
ITEMSIZE: dict[str, int] = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
    "complex64": 8,
}

#: Name in a safetensors header -> name here (safetensors' format description).
SAFETENSORS: dict[str, str] = {
    "BOOL": "bool",
    "I8": "int8",
    "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F16": "float16",
    "BF16": "bfloat16",
    "I16": "int16",
    "U16": "uint16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
}

#: What NCCL M2N carries (vLLM 0.33.0, `m2n_common.SUPPORTED_DTYPES`).
TRANSFERABLE: frozenset[str] = frozenset(
    {
        "int8",
        "uint8",
        "float8_e4m3fn",
        "float8_e5m2",
        "float16",
        "bfloat16",
        "int32",
        "uint32",
        "float32",
        "int64",
        "uint64",
        "float64",
    }
)


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor; `dtype` must be a key of `ITEMSIZE`."""
    total = ITEMSIZE[dtype]
    for size in shape:
        total *= size
    return total
