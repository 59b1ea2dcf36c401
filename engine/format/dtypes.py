"""Dtype names as safetensors spells them, their item sizes, and torch's names for them."""

ITEMSIZE = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "C64": 8,
}
"""Bytes of one element. safetensors has more dtypes (below one byte); no state here has them."""

TORCH_NAME = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F16": "float16",
    "BF16": "bfloat16",
    "I16": "int16",
    "U16": "uint16",
    "F32": "float32",
    "I32": "int32",
    "U32": "uint32",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
    "C64": "complex64",
}
"""Attribute of the torch module for each dtype."""

OF_TORCH_NAME = {torch_name: name for name, torch_name in TORCH_NAME.items()}
"""safetensors' name for each torch dtype, keyed by the attribute of the torch module."""
