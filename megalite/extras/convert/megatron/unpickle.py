"""Pickles read as data: no class is instantiated and no function called but those of plain containers.

A pickle is a program that may call anything it can import. This reader resolves no name to what it names: the names
that Megatron-LM's checkpoints use become inert records, and any other name is an error that quotes it.
Source: https://docs.python.org/3/library/pickle.html#restricting-globals.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch

from megalite.runtime.checkpoint.safetensors_io import BadCheckpoint

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
# What a name stands for: containers, and values without behavior.
_VALUES: dict[str, Any] = {
    "collections.OrderedDict": OrderedDict,
    "__builtin__.set": set,
    "builtins.set": set,
    "torch.Size": tuple,
    **{f"torch.{name}": dtype for name, dtype in _STORAGES.items()},
    **{f"torch.{name}": getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")},
    **{f"torch.{name}": getattr(torch, name) for name in ("int64", "int32", "int16", "int8", "uint8", "bool")},
}
# Names that become records. Those of the last lines occur in states that are not imported (random numbers, paths).
_RECORDS = frozenset(
    f"{module}.{name}"
    for module, names in {
        "torch._utils": "_rebuild_tensor_v2 _rebuild_parameter",
        "torch._tensor": "_rebuild_from_type_v2",
        "torch": "Tensor device",
        "argparse": "Namespace",
        "types": "SimpleNamespace",
        "torch.distributed.checkpoint.metadata": "Metadata TensorStorageMetadata BytesStorageMetadata "
        "ChunkStorageMetadata TensorProperties MetadataIndex StorageMeta _MEM_FORMAT_ENCODING",
        "torch.distributed.checkpoint.filesystem": "_StorageInfo",
        "torch.distributed.checkpoint.planner": "SavePlan WriteItem WriteItemType TensorWriteData",
        "torch.serialization": "_get_layout",
        "numpy": "ndarray dtype",
        "numpy.core.multiarray": "_reconstruct scalar",
        "numpy._core.multiarray": "_reconstruct scalar",
        "_codecs": "encode",
        "_io": "BytesIO",
        "pathlib": "Path PosixPath",
        "signal": "Signals",
    }.items()
    for name in names.split()
)
# Enums and dataclasses of Megatron-LM itself, which move between its modules from version to version.
_RECORD_PREFIX = "megatron."


# Opcodes that no checkpoint uses: the registry of extensions, buffers, and bytes allocated before they are read.
_UNUSED = b"".join(
    (pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER)
)


class _SealedType(type):
    """Class of the record types: a pickle cannot set attributes on them."""

    def __setattr__(cls, name: str, value: Any) -> NoReturn:
        raise TypeError(f"{cls.__name__} cannot be changed")


class Record(metaclass=_SealedType):
    """A call that a pickle asks for: arguments and state, kept as they are.

    Attributes:
        name: name of the class or function to call.
        args: arguments of the call.
        state: attributes of the result; None if the pickle sets none.
    """

    __slots__ = ("args", "state")
    name: ClassVar[str] = ""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any, **_: Any) -> Record:
        self = super().__new__(cls)
        self.args, self.state = args, None
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state


@dataclass(frozen=True)
class Storage:
    """A storage of an archive: its key and type, and the number of elements that the pickle claims."""

    key: str
    dtype: torch.dtype
    numel: int


class _Reader(pickle._Unpickler):
    """Python's own implementation: its memo is a dictionary, while that in C allocates whatever a file asks for."""

    dispatch: ClassVar[dict[int, Any]] = {
        code: load for code, load in pickle._Unpickler.dispatch.items() if code not in _UNUSED
    }

    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(io.BytesIO(data))
        self._where = where
        self._types: dict[str, type[Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in _VALUES:
            return _VALUES[full]
        if full not in _RECORDS and not full.startswith(_RECORD_PREFIX):
            rule = f"its pickle names {full!r:.200}, which no Megatron-LM checkpoint needs; nothing was executed"
            raise BadCheckpoint(self._where, rule, "use a checkpoint that you trust")
        if full not in self._types:
            record_type = _SealedType(name, (Record,), {"__slots__": (), "name": full})
            assert issubclass(record_type, Record)
            self._types[full] = record_type
        return self._types[full]

    def persistent_load(self, pid: Any) -> Storage:
        kind, dtype, key, _, numel = pid
        if kind != "storage" or type(dtype) is not torch.dtype or type(key) is not str or type(numel) is not int:
            raise pickle.UnpicklingError("a persistent id is not a storage")
        return Storage(key, dtype, numel)


def unpickle(data: bytes, where: str) -> Any:
    """Read a pickle as containers, numbers, texts, `Record`s and `Storage`s.

    Args:
        data: the pickle.
        where: its file, for errors.

    Raises:
        BadCheckpoint: it names something that is not allowed, or is damaged.
    """
    try:
        return _Reader(data, where).load()
    except BadCheckpoint:
        raise
    except Exception as e:
        raise BadCheckpoint(where, f"is not a pickle of a checkpoint ({type(e).__name__}: {e!s:.200})") from None
