"""Conversions of well-known types of the standard library and other libraries to plain values and back.

Nothing here imports a library: an instance of a type exists only if its library is imported, and a process in which the
library is not imported raises an error in place of the value. docs/protocol.md ("Registered types") specifies the plain
values. They may come from a malicious peer: every function that restores a value must reject plain values that would
make the library read or write invalid memory, and must not call code that the plain value selects.
"""

from __future__ import annotations

import enum
import math
import operator
import pathlib
import sys
from abc import ABCMeta
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from functools import reduce
from inspect import getattr_static
from itertools import pairwise
from typing import Any, Final
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
from numpy.typing import NDArray

from teleloader_shared.records import class_dict, find_class

MAX_DIGITS: Final = 4300
"""Maximum number of digits of an integer or Decimal: Python's default limit for parsing."""


@dataclass(frozen=True, slots=True)
class TypeEntry:
    """Conversion of a type to plain values and back."""

    name: str
    """Name of the type in frames."""
    to_plain: Callable[[Any], Any]
    """Convert an instance to a value that a batch can hold."""
    from_plain: Callable[[Any], Any]
    """Convert the plain value to an instance; exceptions become a `DecodeError`."""
    subclasses: bool = False
    """True to convert instances of subclasses, too."""


def _loaded(module: str) -> Any:
    found = sys.modules.get(module)
    if found is None:
        raise LookupError(f"module {module} is not imported in this process: import it before iterating")
    return found


# -- standard library


def _zone_to_plain(zone: tzinfo | None) -> Any:
    if zone is None:
        return None
    if isinstance(zone, timezone):
        offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined] # what pickle uses
        return [offset // timedelta(microseconds=1), *name]
    key = getattr(zone, "key", None)
    if isinstance(zone, ZoneInfo) and key is not None:
        return key
    raise TypeError(f"time zone {zone!r} must be a datetime.timezone or a zoneinfo.ZoneInfo with a key")


def _zone_from_plain(plain: Any) -> tzinfo | None:
    match plain:
        case None:
            return None
        case str(key):
            return ZoneInfo(key)
        case [int(microseconds)]:
            return timezone(timedelta(microseconds=microseconds))
        case [int(microseconds), str(name)]:
            return timezone(timedelta(microseconds=microseconds), name)
    raise ValueError(f"invalid time zone {plain!r}")


def _moment_to_plain(moment: datetime | time) -> list[Any]:
    return [moment.replace(tzinfo=None, fold=0).isoformat(), moment.fold, _zone_to_plain(moment.tzinfo)]


def _moment_from_plain(kind: type[datetime] | type[time]) -> Callable[[Any], datetime | time]:
    def restore(plain: Any) -> datetime | time:
        text, fold, zone = plain
        return kind.fromisoformat(text).replace(fold=fold, tzinfo=_zone_from_plain(zone))

    return restore


def _decimal_to_plain(number: Decimal) -> str:
    text = str(number)
    if len(text) > MAX_DIGITS:
        raise ValueError(f"the Decimal has more than {MAX_DIGITS:,} characters")
    return text


def _decimal_from_plain(text: str) -> Decimal:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"the Decimal has more than {MAX_DIGITS:,} characters")
    return Decimal(text)


_PATHS: Final[dict[str, type[pathlib.PurePath]]] = {
    kind.__name__: kind
    for kind in (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath)
}


def _path_to_plain(path: pathlib.PurePath) -> list[str]:
    kind = type(path)
    if _PATHS.get(kind.__name__) is not kind:
        raise TypeError(f"subclass {kind.__qualname__} of pathlib.Path would be lost")
    return [kind.__name__, str(path)]


def _path_from_plain(plain: Any) -> pathlib.PurePath:
    name, text = plain
    try:
        return _PATHS[name](text)
    except NotImplementedError:  # a path of another operating system
        return _PATHS[f"Pure{name}"](text)


def _enum_to_plain(member: enum.Enum) -> list[Any]:
    kind = type(member)
    names: list[str | None] = [member.name]
    if isinstance(member, enum.Flag):
        names = [one.name for one in member]
        if _combined(kind, names) != member.value:
            raise ValueError(f"{member!r} has bits that are no members of {kind.__qualname__}")
    return [str(kind.__module__), kind.__qualname__, names]


def _enum_from_plain(plain: Any) -> Any:
    module, qualname, names = plain
    found: Any = find_class(module, qualname, type, ABCMeta, enum.EnumType)
    if found is None or enum.Enum not in found.__mro__:
        raise LookupError(f"enum {module}.{qualname} is not imported in this process: import it before iterating")
    if enum.Flag not in found.__mro__:
        (name,) = names
        return class_dict(found)["_member_map_"][name]
    if getattr_static(found, "_missing_") is not getattr_static(enum.Flag, "_missing_"):
        raise TypeError(f"{module}.{qualname} must not override _missing_, which would run in this process")
    return found(_combined(found, names))


def _combined(flag: type[enum.Enum], names: Iterable[str | None]) -> int:
    members = class_dict(flag)["_member_map_"]
    return reduce(operator.or_, (members[name].value for name in names), 0)


# -- NumPy: dtypes that are not element types of frames


def is_describable(dtype: np.dtype[Any]) -> bool:
    """Return True if `ARRAY` converts arrays of this dtype: strings, bytes, dates, time differences and records."""
    if dtype.hasobject or dtype.kind not in "USMmV":
        return False
    return bool(np.lib.format.descr_to_dtype(np.lib.format.dtype_to_descr(dtype)) == dtype)


def _array_to_plain(array: NDArray[Any]) -> list[Any]:
    plain = np.asarray(array, order="C")
    bits = np.ndarray((*plain.shape, plain.itemsize), np.uint8, plain.tobytes())
    return [np.lib.format.dtype_to_descr(plain.dtype), isinstance(array, np.generic), bits]


def _array_from_plain(plain: Any) -> Any:
    description, is_scalar, bits = plain
    dtype = np.lib.format.descr_to_dtype(description)
    if dtype.hasobject or bits.dtype != np.uint8 or bits.shape[-1] != dtype.itemsize:
        raise ValueError(f"invalid array of dtype {dtype}")
    array = np.ndarray(bits.shape[:-1], dtype, np.ascontiguousarray(bits))
    return array[()] if is_scalar else array


ARRAY: Final = TypeEntry("numpy.ndarray", _array_to_plain, _array_from_plain)
"""Entry for arrays whose dtype is not an element type of frames."""


# -- torch: layouts that are not dense


def _sparse_to_plain(tensor: Any) -> list[Any]:
    layout = str(tensor.layout).removeprefix("torch.")
    tensor = tensor.detach()
    if layout == "sparse_coo":
        parts = [tensor.is_coalesced(), tensor._indices(), tensor._values()]
    elif layout in ("sparse_csr", "sparse_bsr"):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif layout in ("sparse_csc", "sparse_bsc"):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    else:
        raise TypeError(f"layout {layout} is not supported: convert the tensor to a dense one")
    return [layout, list(tensor.shape), *parts]


def _sparse_from_plain(plain: Any) -> Any:
    torch = _loaded("torch")
    layout, shape, *parts = plain
    if layout == "sparse_coo":
        is_coalesced, indices, values = parts
        return torch.sparse_coo_tensor(
            torch.as_tensor(indices), torch.as_tensor(values), shape, is_coalesced=is_coalesced, check_invariants=True
        )
    if layout not in ("sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"):
        raise ValueError(f"invalid layout {layout!r}")
    return torch.sparse_compressed_tensor(
        *map(torch.as_tensor, parts), shape, layout=getattr(torch, layout), check_invariants=True
    )


def _nested_to_plain(tensor: Any) -> list[Any]:
    tensor = tensor.detach()
    if tensor.layout is _loaded("torch").strided:
        return ["strided", list(tensor.unbind())]
    return ["jagged", tensor._ragged_idx, tensor.values(), tensor.offsets(), tensor.lengths()]


def _nested_from_plain(plain: Any) -> Any:
    torch = _loaded("torch")
    match plain:
        case ["strided", list(tensors)]:
            return torch.nested.nested_tensor([torch.as_tensor(tensor) for tensor in tensors])
        case ["jagged", int(dimension), values, offsets, lengths]:
            values, offsets = torch.as_tensor(values), torch.as_tensor(offsets)
            lengths = None if lengths is None else torch.as_tensor(lengths)
            _check_jagged(values.shape[dimension - 1], offsets, lengths)
            return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=dimension)
    raise ValueError("invalid nested tensor")


def _check_jagged(size: int, offsets: Any, lengths: Any) -> None:
    """Check that the parts of a nested tensor are within its values, which torch does not check."""
    starts = offsets.tolist()
    ends = starts[1:] if lengths is None else [start + n for start, n in zip(starts, lengths.tolist(), strict=False)]
    if not starts or starts[0] < 0 or not all(a <= b for a, b in pairwise(starts)):
        raise ValueError("invalid offsets of a nested tensor")
    if not all(start <= end <= size for start, end in zip(starts, ends, strict=False)):
        raise ValueError("invalid lengths of a nested tensor")


SPARSE: Final = TypeEntry("torch.sparse", _sparse_to_plain, _sparse_from_plain)
"""Entry for sparse tensors, whose class is that of dense tensors."""
NESTED: Final = TypeEntry("torch.nested", _nested_to_plain, _nested_from_plain)
"""Entry for nested tensors, whose class may be that of dense tensors."""


def _subclass_entry(name: str, module: str) -> TypeEntry:
    """Return the entry of a subclass of torch.Tensor whose state is the tensor and the attributes of the instance."""

    def to_plain(tensor: Any) -> list[Any]:
        return [tensor.detach().as_subclass(_loaded("torch").Tensor), vars(tensor)]

    def from_plain(plain: Any) -> Any:
        tensor, attributes = plain
        made = _loaded("torch").as_tensor(tensor).as_subclass(getattr(_loaded(module), name.rpartition(".")[2]))
        vars(made).update(attributes)
        return made

    return TypeEntry(name, to_plain, from_plain)


# -- other libraries


def _timestamp_to_plain(moment: Any) -> list[Any]:
    zone = moment.tzinfo
    name = getattr(zone, "key", None) or getattr(zone, "zone", None)  # of zoneinfo or pytz
    return [moment.asm8, name or _zone_to_plain(zone)]


def _timestamp_from_plain(plain: Any) -> Any:
    pandas = _loaded("pandas")
    moment, zone = plain
    naive = pandas.Timestamp(moment)
    if zone is None:
        return naive
    return naive.tz_localize("UTC").tz_convert(zone if isinstance(zone, str) else _zone_from_plain(zone))


def _image_to_plain(image: Any) -> list[Any]:
    data = np.frombuffer(image.tobytes(), np.uint8)
    palette = None if image.palette is None else [image.palette.mode, image.getpalette(image.palette.mode)]
    return [image.mode, image.size, image.info, palette, data]


def _image_from_plain(plain: Any) -> Any:
    mode, size, info, palette, data = plain
    if math.prod(size) > 8 * data.nbytes:  # Pillow would allocate the pixels before it compares the sizes
        raise ValueError(f"{data.nbytes} bytes are too few for an image of size {size}")
    image = _loaded("PIL.Image").frombytes(mode, tuple(size), data.tobytes())
    if palette is not None:
        image.putpalette(palette[1], palette[0])
    image.info = info
    return image


def _rational_to_plain(number: Any) -> list[Any]:
    return [number.numerator, number.denominator]


def _rational_from_plain(plain: Any) -> Any:
    return _loaded("PIL.TiffImagePlugin").IFDRational(*_integers(plain))


def _integers(plain: Any) -> tuple[int, int]:
    """Return numerator and denominator; a text such as 1e999999999 would take memory and time without limit."""
    numerator, denominator = plain
    if type(numerator) is not int or type(denominator) is not int:
        raise ValueError("numerator and denominator must be integers")
    return numerator, denominator


def _encodings_to_plain(batch: Any) -> list[Any]:
    return [batch.data, batch.encodings, batch.n_sequences]


def _encodings_from_plain(plain: Any) -> Any:
    data, encodings, n_sequences = plain
    return _loaded("transformers.tokenization_utils_base").BatchEncoding(data, encodings, n_sequences=n_sequences)


def _feature_to_plain(batch: Any) -> list[Any]:
    return [batch.data, {name: value for name, value in vars(batch).items() if name != "data"}]


def _feature_from_plain(plain: Any) -> Any:
    data, attributes = plain
    batch = _loaded("transformers.feature_extraction_utils").BatchFeature(data)
    vars(batch).update({**attributes, "data": data})
    return batch


def _encoding_from_plain(plain: Any) -> Any:
    encoding = _loaded("tokenizers").Encoding()
    encoding.__setstate__(plain)  # parses JSON
    return encoding


def _tensordict_to_plain(value: Any) -> list[Any]:
    device = None if value.device is None else str(value.device)
    return [dict(value.items()), list(value.batch_size), device, value.names, value.is_locked]


def _tensordict_from_plain(plain: Any) -> Any:
    items, batch_size, device, names, is_locked = plain
    return _loaded("tensordict").TensorDict(items, batch_size, device, names=names, lock=is_locked)


def _nontensor_to_plain(value: Any) -> list[Any]:
    return [value.data, list(value.batch_size)]


def _nontensor_from_plain(plain: Any) -> Any:
    data, batch_size = plain
    return _loaded("tensordict").NonTensorData(data, batch_size=batch_size)


def _graph_to_plain(graph: Any) -> list[Any]:
    return [graph._store._mapping, _private(graph._store)]


def _graph_from_plain(plain: Any) -> Any:
    return _filled(_loaded("torch_geometric.data").Data(), plain)


def _graphs_to_plain(graphs: Any) -> list[Any]:
    if _loaded("torch_geometric.data").Data not in type(graphs).__bases__:
        raise TypeError("only batches of torch_geometric.data.Data are supported")
    return _graph_to_plain(graphs)


def _graphs_from_plain(plain: Any) -> Any:
    data = _loaded("torch_geometric.data")
    return _filled(data.Batch(_base_cls=data.Data), plain)


def _private(store: Any) -> dict[str, Any]:
    """Return what a batch stores to be divided into its graphs again."""
    return {name: value for name, value in vars(store).items() if name not in ("_mapping", "_parent")}


def _filled(graph: Any, plain: Any) -> Any:
    mapping, private = plain
    graph._store._mapping.update(mapping)
    vars(graph._store).update({name: private[name] for name in private if name not in ("_mapping", "_parent")})
    return graph


_ENUM: Final = TypeEntry("enum.Enum", _enum_to_plain, _enum_from_plain, subclasses=True)
_PATH: Final = TypeEntry("pathlib.Path", _path_to_plain, _path_from_plain, subclasses=True)
_TIMESTAMP: Final = TypeEntry("pandas.Timestamp", _timestamp_to_plain, _timestamp_from_plain)
_NAT: Final = TypeEntry("pandas.NaT", lambda _: None, lambda _: _loaded("pandas").NaT)

ENTRIES: Final[dict[str, TypeEntry]] = {
    "datetime.datetime": TypeEntry("datetime.datetime", _moment_to_plain, _moment_from_plain(datetime)),
    "datetime.time": TypeEntry("datetime.time", _moment_to_plain, _moment_from_plain(time)),
    "datetime.date": TypeEntry("datetime.date", date.isoformat, date.fromisoformat),
    "datetime.timedelta": TypeEntry(
        "datetime.timedelta",
        lambda duration: [duration.days, duration.seconds, duration.microseconds],
        lambda plain: timedelta(*plain),
    ),
    "decimal.Decimal": TypeEntry("decimal.Decimal", _decimal_to_plain, _decimal_from_plain),
    "fractions.Fraction": TypeEntry(
        "fractions.Fraction", _rational_to_plain, lambda plain: Fraction(*_integers(plain))
    ),
    "uuid.UUID": TypeEntry("uuid.UUID", lambda value: value.bytes, lambda plain: UUID(bytes=plain)),
    "enum.Enum": _ENUM,
    "pathlib.PurePath": _PATH,
    "pathlib._local.PurePath": _PATH,  # Python 3.13
    "pandas.Timestamp": _TIMESTAMP,
    "pandas._libs.tslibs.timestamps.Timestamp": _TIMESTAMP,
    "pandas.api.typing.NaTType": _NAT,
    "pandas._libs.tslibs.nattype.NaTType": _NAT,
    "PIL.Image.Image": TypeEntry("PIL.Image.Image", _image_to_plain, _image_from_plain, subclasses=True),
    "PIL.TiffImagePlugin.IFDRational": TypeEntry(
        "PIL.TiffImagePlugin.IFDRational", _rational_to_plain, _rational_from_plain
    ),
    "transformers.tokenization_utils_base.BatchEncoding": TypeEntry(
        "transformers.BatchEncoding", _encodings_to_plain, _encodings_from_plain
    ),
    "transformers.feature_extraction_utils.BatchFeature": TypeEntry(
        "transformers.BatchFeature", _feature_to_plain, _feature_from_plain
    ),
    "tokenizers.Encoding": TypeEntry(
        "tokenizers.Encoding", lambda encoding: encoding.__getstate__(), _encoding_from_plain
    ),
    "tensordict._td.TensorDict": TypeEntry("tensordict.TensorDict", _tensordict_to_plain, _tensordict_from_plain),
    "tensordict.tensorclass.NonTensorData": TypeEntry(
        "tensordict.NonTensorData", _nontensor_to_plain, _nontensor_from_plain
    ),
    "torch_geometric.data.data.Data": TypeEntry("torch_geometric.data.Data", _graph_to_plain, _graph_from_plain),
    "torch_geometric.data.batch.Batch": TypeEntry(
        "torch_geometric.data.Batch", _graphs_to_plain, _graphs_from_plain, subclasses=True
    ),
    "torch.nested._internal.nested_tensor.NestedTensor": NESTED,
    "monai.data.meta_tensor.MetaTensor": _subclass_entry("monai.data.MetaTensor", "monai.data"),
    **{
        f"torchvision.tv_tensors._{module}.{name}": _subclass_entry(
            f"torchvision.tv_tensors.{name}", "torchvision.tv_tensors"
        )
        for module, name in (
            ("image", "Image"), ("video", "Video"), ("mask", "Mask"), ("bounding_boxes", "BoundingBoxes"),
            ("keypoints", "KeyPoints"),
        )
    },
}  # fmt: skip
"""Entries by the module and qualified name of the class."""
