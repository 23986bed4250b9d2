"""Conversions of types of other libraries to plain values and back, and the list of all ready-made conversions.

Nothing here imports a library: an instance of a type exists only if its library is imported, and a process in which the
library is not imported raises an error in place of the value. docs/protocol.md ("Registered types") specifies the plain
values.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from teleloader_shared.array_types import NESTED
from teleloader_shared.plain_values import (
    ANY,
    TypeEntry,
    UnsupportedValue,
    check_lost,
    exact,
    listed,
    loaded,
    new_attributes,
    received_bytes,
    received_tensor,
    sizes,
)
from teleloader_shared.standard_types import STANDARD, integers, rational_to_plain, zone_from_plain, zone_to_plain
from teleloader_shared.text import short


def _subclass_entry(name: str, module: str) -> TypeEntry:
    """Return the entry of a subclass of torch.Tensor whose state is the tensor and the attributes of the instance."""

    def to_plain(tensor: Any) -> list[Any]:
        return [tensor.detach().as_subclass(loaded("torch").Tensor), new_attributes(type(tensor), vars(tensor))]

    def from_plain(plain: Any) -> Any:
        kind = getattr(loaded(module), name.rpartition(".")[2])
        tensor, attributes = listed(plain, ANY, dict)
        made = received_tensor(tensor).as_subclass(kind)
        vars(made).update(new_attributes(kind, attributes))
        return made

    return TypeEntry(name, to_plain, from_plain)


def _timestamp_to_plain(moment: Any) -> list[Any]:
    zone = moment.tzinfo
    name = getattr(zone, "zone", None)  # of pytz
    return [moment.asm8, name if type(name) is str else zone_to_plain(zone), moment.fold]


def _timestamp_from_plain(plain: Any) -> Any:
    moment, zone, fold = listed(plain, np.datetime64, (type(None), str, list), int)
    naive = loaded("pandas").Timestamp(moment)
    if zone is None:
        return naive.replace(fold=fold) if fold else naive
    # never by its name: pandas would open any file for "dateutil/" and a path
    return naive.tz_localize("UTC").tz_convert(zone_from_plain(zone))


_IMAGE_BITS: Final = {
    "1": 1, **dict.fromkeys(("L", "P"), 8), **dict.fromkeys(("LA", "La", "PA"), 16),
    **dict.fromkeys(("I;16", "I;16L", "I;16B", "I;16N"), 16), **dict.fromkeys(("RGB", "YCbCr", "LAB", "HSV"), 24),
    **dict.fromkeys(("RGBA", "RGBa", "RGBX", "CMYK", "I", "F"), 32),
}  # fmt: skip
"""Bits per pixel in the bytes of an image; each row takes whole bytes."""
_PALETTE_BANDS: Final = {"RGB": 3, "RGBA": 4, "CMYK": 4}


def _image_size(mode: str, size: Iterable[int]) -> int:
    """Return the number of bytes of an image; an image without pixels could take much memory for its rows."""
    if mode not in _IMAGE_BITS:
        raise UnsupportedValue(f"images of mode {short(mode)} are not supported: convert the image to another mode")
    width, height = size
    if width < 1 or height < 1:
        raise UnsupportedValue(f"an image must have at least one pixel, got size {width} x {height}")
    return -(-width * _IMAGE_BITS[mode] // 8) * height


def _image_to_plain(image: Any) -> list[Any]:
    module = loaded("PIL.Image")
    files = sys.modules.get("PIL.ImageFile")
    if files is None or not isinstance(image, files.ImageFile):  # of a file, an image has more, as documented
        check_lost(vars(image).keys() - vars(module.Image()).keys())
    _check_exif(image)
    nbytes = _image_size(image.mode, image.size)
    data = np.frombuffer(image.tobytes(), np.uint8)
    if data.nbytes != nbytes:
        raise ValueError(f"Pillow returned {data.nbytes:,} bytes for an image with {nbytes:,} bytes")
    palette = None
    if image.mode in ("P", "PA") and image.palette is not None:
        palette = [image.palette.mode, bytes(image.getpalette(image.palette.mode))]
    return [image.mode, list(image.size), image.info, palette, data]


def _check_exif(image: Any) -> None:
    """Raise UnsupportedValue if the Exif data were changed: like a pickled image, a sent one has only those in `info`.

    Nothing is parsed for images whose `getexif` was not called, nor for TIFF files, whose Exif data are not in `info`.
    """
    exif = getattr(image, "_exif", None)
    if exif is None or not getattr(exif, "_loaded", False) or hasattr(image, "tag_v2"):
        return
    stored = loaded("PIL.Image").Image()
    stored.info = image.info
    try:
        expected = stored.getexif()
        for tag in exif._ifds:  # `tobytes` writes some directories only after they were read
            expected.get_ifd(tag)
        content = expected.tobytes()
    except Exception:  # noqa: BLE001 - data that Pillow can read, but not write, cannot be compared
        return
    if exif.tobytes() != content:
        raise UnsupportedValue(
            "changes of image.getexif() would be lost: set image.info['exif'] = image.getexif().tobytes()"
        )


def _image_from_plain(plain: Any) -> Any:
    module = loaded("PIL.Image")
    mode, size, info, palette, data = listed(plain, str, list, dict, (type(None), list), ANY)
    data, size = received_bytes(data), sizes(size)
    if data.nbytes != _image_size(mode, size):  # checked before Pillow allocates the pixels
        raise ValueError(f"{data.nbytes:,} bytes do not match an image of mode {mode} and size {size}")
    image = module.frombytes(mode, tuple(size), np.ascontiguousarray(data).data)
    if palette is not None:
        palette_mode, colors = listed(palette, str, bytes)
        bands = _PALETTE_BANDS.get(palette_mode, 0)
        if mode not in ("P", "PA") or not bands or len(colors) > 256 * bands or len(colors) % bands:
            raise ValueError(f"invalid palette of an image of mode {mode}")
        image.putpalette(colors, palette_mode)
    image.info = info
    return image


def _text_to_plain(text: Any) -> list[Any]:
    check_lost(vars(text).keys() - {"lang", "tkey"})
    return [str(text), text.lang, text.tkey]


def _text_from_plain(plain: Any) -> Any:
    optional = (type(None), str, bytes)
    return loaded("PIL.PngImagePlugin").iTXt(*listed(plain, str, optional, optional))


def _encodings_to_plain(batch: Any) -> list[Any]:
    check_lost(vars(batch).keys() - {"data", "_encodings", "_n_sequences"})
    encodings = None if batch.encodings is None else list(batch.encodings)
    return [dict(batch.data), encodings, batch.n_sequences]


def _encodings_from_plain(plain: Any) -> Any:
    data, encodings, n_sequences = listed(plain, dict, (type(None), list), (type(None), int))
    kind = getattr(sys.modules.get("tokenizers"), "Encoding", None)
    if encodings and any(type(encoding) is not kind for encoding in encodings):
        raise TypeError("expected a list of tokenizers.Encoding")
    batch = loaded("transformers.tokenization_utils_base").BatchEncoding()
    batch.data, batch._encodings, batch._n_sequences = data, encodings, n_sequences
    return batch


def _feature_to_plain(batch: Any) -> list[Any]:
    attributes = {name: value for name, value in vars(batch).items() if name != "data"}
    return [dict(batch.data), new_attributes(type(batch), attributes)]


def _feature_from_plain(plain: Any) -> Any:
    kind = loaded("transformers.feature_extraction_utils").BatchFeature
    data, attributes = listed(plain, dict, dict)
    batch = kind()
    vars(batch).update({**new_attributes(kind, attributes), "data": data})
    return batch


def _encoding_from_plain(plain: Any) -> Any:
    encoding = loaded("tokenizers").Encoding()
    encoding.__setstate__(exact(plain, bytes))  # parses JSON
    return encoding


def _check_tensordict(value: Any) -> list[Any]:
    """Return batch size, device, names and lock of a TensorDict or NonTensorData."""
    device = None if value.device is None else str(value.device)
    return [list(value.batch_size), _on_cpu(device), value.names, value.is_locked]


def _on_cpu(device: str | None) -> str | None:
    if device not in (None, "cpu"):
        raise UnsupportedValue(f"expected device cpu or None, got {short(device)}")
    return device


_LAYOUT: Final = (list, (type(None), str), (type(None), list), bool)
"""Types of batch size, device, names and lock."""


def _layout(batch_size: Any, device: Any, names: Any) -> dict[str, Any]:
    """Return the arguments that TensorDict and NonTensorData have in common."""
    if names is not None and any(type(name) not in (type(None), str) for name in names):
        raise TypeError("names of dimensions must be strings or None")
    return {"batch_size": sizes(batch_size), "device": _on_cpu(device), "names": names}


def _tensordict_values() -> tuple[Any, ...]:
    """Return the types of values that a TensorDict stores as they are; other values would be converted."""
    tensordict, torch = loaded("tensordict"), loaded("torch")
    jagged = getattr(sys.modules.get("torch.nested._internal.nested_tensor"), "NestedTensor", None)
    nontensors = (tensordict.NonTensorData, tensordict.NonTensorStack)
    return torch.Tensor, tensordict.TensorDict, *nontensors, jagged


def _tensordict_to_plain(value: Any) -> list[Any]:
    check_lost(name for name in vars(value) if not name.startswith("_"))
    items = dict(value._tensordict)
    kinds = _tensordict_values()
    for name, item in items.items():
        if type(item) not in kinds:
            raise UnsupportedValue(f"type {type(item).__qualname__} of the value {name!r} is not supported")
    return [items, *_check_tensordict(value)]


def _tensordict_from_plain(plain: Any) -> Any:
    kind = loaded("tensordict").TensorDict
    items, batch_size, device, names, is_locked = listed(plain, dict, *_LAYOUT)
    kinds = _tensordict_values()
    made = kind({}, **_layout(batch_size, device, names))
    for name, item in items.items():
        made.set(exact(name, str), item if type(item) in kinds else received_tensor(item))
    return made.lock_() if is_locked else made


def _nontensor_to_plain(value: Any) -> list[Any]:
    inner = value._non_tensordict
    check_lost(inner.keys() - {"data", "_metadata", "_is_non_tensor"})
    if inner.get("_metadata") is not None:
        raise UnsupportedValue("metadata would be lost")
    return [inner["data"], *_check_tensordict(value)]


def _nontensor_from_plain(plain: Any) -> Any:
    data, batch_size, device, names, is_locked = listed(plain, ANY, *_LAYOUT)
    made = loaded("tensordict").NonTensorData(None, **_layout(batch_size, device, names))
    made._non_tensordict["data"] = data  # the constructor would call methods of the value
    return made.lock_() if is_locked else made


def _nontensors_to_plain(stack: Any) -> list[Any]:
    check_lost(name for name in vars(stack) if not name.startswith("_") and name not in ("tensordicts", "stack_dim"))
    for name in ("_hook_in", "_hook_out", "_td_dim_name"):
        if getattr(stack, name, None) is not None:
            raise UnsupportedValue(f"attribute {name!r} would be lost")
    return [list(stack.tensordicts), stack.stack_dim, stack.is_locked]


def _nontensors_from_plain(plain: Any) -> Any:
    tensordict = loaded("tensordict")
    parts, dimension, is_locked = listed(plain, list, int, bool)
    if not parts or any(type(part) not in (tensordict.NonTensorData, tensordict.NonTensorStack) for part in parts):
        raise TypeError("expected a list of NonTensorData or NonTensorStack")
    made = tensordict.NonTensorStack(*parts, stack_dim=dimension)
    return made.lock_() if is_locked else made


def _graph_to_plain(graph: Any) -> list[Any]:
    return _graph_parts(graph, loaded("torch_geometric.data").Data())


def _graph_from_plain(plain: Any) -> Any:
    return _filled(loaded("torch_geometric.data").Data(), plain)


def _graphs_to_plain(graphs: Any) -> list[Any]:
    data = loaded("torch_geometric.data")
    empty = data.Batch(_base_cls=data.Data)
    if type(graphs) is not type(empty):
        raise UnsupportedValue("only batches of torch_geometric.data.Data are supported")
    return _graph_parts(graphs, empty)


def _graphs_from_plain(plain: Any) -> Any:
    data = loaded("torch_geometric.data")
    return _filled(data.Batch(_base_cls=data.Data), plain)


def _graph_parts(graph: Any, empty: Any) -> list[Any]:
    """Return the attributes of a graph, and what a batch stores to be divided into its graphs again."""
    check_lost(vars(graph).keys() - vars(empty).keys())
    store = graph._store
    private = {name: value for name, value in vars(store).items() if name not in _STORE and name != "_cached_attr"}
    return [store._mapping, new_attributes(type(store), private)]


def _filled(graph: Any, plain: Any) -> Any:
    mapping, private = listed(plain, dict, dict)
    store = graph._store
    if not _STORE.isdisjoint(new_attributes(type(store), private)) or any(type(name) is not str for name in mapping):
        raise ValueError("invalid attributes of a graph")
    store._mapping.update(mapping)
    vars(store).update(private)
    return graph


_STORE: Final = frozenset(("_mapping", "_parent"))
_TIMESTAMP: Final = TypeEntry("pandas.Timestamp", _timestamp_to_plain, _timestamp_from_plain)
_NAT: Final = TypeEntry("pandas.NaT", lambda _: None, lambda _: loaded("pandas").NaT)

ENTRIES: Final[dict[str, TypeEntry]] = {
    **STANDARD,
    "pandas.Timestamp": _TIMESTAMP,
    "pandas._libs.tslibs.timestamps.Timestamp": _TIMESTAMP,
    "pandas.api.typing.NaTType": _NAT,
    "pandas._libs.tslibs.nattype.NaTType": _NAT,
    "PIL.Image.Image": TypeEntry("PIL.Image.Image", _image_to_plain, _image_from_plain, subclasses=True),
    "PIL.TiffImagePlugin.IFDRational": TypeEntry(
        "PIL.TiffImagePlugin.IFDRational",
        rational_to_plain,
        lambda plain: loaded("PIL.TiffImagePlugin").IFDRational(*integers(plain)),
    ),
    "PIL.PngImagePlugin.iTXt": TypeEntry("PIL.PngImagePlugin.iTXt", _text_to_plain, _text_from_plain),
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
    "tensordict.tensorclass.NonTensorStack": TypeEntry(
        "tensordict.NonTensorStack", _nontensors_to_plain, _nontensors_from_plain
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
