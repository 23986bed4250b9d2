"""Small files in the formats of dataset libraries; each function returns the keyword arguments of a recipe."""

from __future__ import annotations

import io
import tarfile
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

LENGTH = 22
"""Number of samples: not a multiple of the batch size or of the number of files."""
FILES = 4

Kwargs = dict[str, Any]

images = np.random.default_rng(0).integers(0, 256, (LENGTH, 12, 12, 3), np.uint8)
labels = np.arange(LENGTH) % 5
vectors = np.random.default_rng(1).normal(size=(LENGTH, 3)).astype(np.float32)


def columns() -> dict[str, Any]:
    """Return a table of numbers, strings and vectors."""
    return {
        "index": list(range(LENGTH)),
        "text": [f"sample {index}" for index in range(LENGTH)],
        "score": [index / 3 for index in range(LENGTH)],
        "vector": vectors.tolist(),
    }


def parts() -> list[range]:
    """Divide the samples among files, unequally."""
    return [range(LENGTH)[part::FILES] for part in range(FILES)]


def hugging_face(folder: Path) -> Kwargs:
    """Write a folder of `save_to_disk`."""
    import_module("datasets").Dataset.from_dict(columns()).save_to_disk(folder / "rows", num_shards=2)
    return {"path": str(folder / "rows")}


def parquet(folder: Path) -> Kwargs:
    """Write Parquet files of several row groups."""
    pa, pq = import_module("pyarrow"), import_module("pyarrow.parquet")
    table = pa.table(columns())
    for number, part in enumerate(parts()):
        pq.write_table(table.take(list(part)), folder / f"{number}.parquet", row_group_size=3)
    return {"files": [str(folder / f"{number}.parquet") for number in range(FILES)]}


def arrow(folder: Path) -> Kwargs:
    """Write an uncompressed Arrow file."""
    pa = import_module("pyarrow")
    table = pa.table(columns())
    with pa.ipc.new_file(folder / "rows.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=5)
    return {"path": str(folder / "rows.arrow")}


def tar(folder: Path) -> Kwargs:
    """Write tar files with an array and a label per sample."""
    for number, part in enumerate(parts()):
        with tarfile.open(folder / f"{number}.tar", "w") as file:
            for index in part:
                array = io.BytesIO()
                np.save(array, images[index])
                for name, content in (("image.npy", array.getvalue()), ("label.cls", b"%d" % labels[index])):
                    member = tarfile.TarInfo(f"{index:06}.{name}")
                    member.size = len(content)
                    file.addfile(member, io.BytesIO(content))
    return {"files": [str(folder / f"{number}.tar") for number in range(FILES)]}


def mosaic(folder: Path) -> Kwargs:
    """Write shards of mosaicml-streaming."""
    streaming = import_module("streaming")
    kinds = {"index": "int", "text": "str", "score": "float64"}
    with streaming.MDSWriter(out=str(folder / "mosaic"), columns=kinds, size_limit=1024) as writer:
        for index in range(LENGTH):
            writer.write({"index": index, "text": f"sample {index}", "score": index / 3})
    return {"path": str(folder / "mosaic")}


def lit(folder: Path) -> Kwargs:
    """Write chunks of litdata."""
    path = str(folder / "lit")
    import_module("litdata").optimize(
        fn=_lit_sample, inputs=list(range(LENGTH)), output_dir=path, chunk_size=4, num_workers=1
    )
    return {"path": path}


def _lit_sample(index: int) -> dict[str, Any]:
    return {"index": index, "text": f"sample {index}", "vector": vectors[index]}


def lance(folder: Path) -> Kwargs:
    """Write a Lance dataset."""
    import_module("lance").write_dataset(import_module("pyarrow").table(columns()), str(folder / "rows.lance"))
    return {"path": str(folder / "rows.lance")}


def hdf5(folder: Path) -> Kwargs:
    """Write a compressed HDF5 file."""
    with import_module("h5py").File(folder / "images.h5", "w") as file:
        file.create_dataset("images", data=images, chunks=(1, 12, 12, 3), compression="gzip")
        file["labels"] = labels
    return {"path": str(folder / "images.h5")}


def zarr(folder: Path) -> Kwargs:
    """Write a chunked Zarr array."""
    array = import_module("zarr").create_array(
        str(folder / "images.zarr"), shape=images.shape, dtype=images.dtype, chunks=(4, 12, 12, 3)
    )
    array[:] = images
    return {"path": str(folder / "images.zarr")}


def lmdb(folder: Path) -> Kwargs:
    """Write an LMDB environment."""
    path = str(folder / "samples.lmdb")
    with import_module("lmdb").open(path, map_size=2**20) as opened, opened.begin(write=True) as transaction:
        for index, vector in enumerate(vectors):
            transaction.put(b"%08d" % index, vector.tobytes())
    return {"path": path}


def tokens(folder: Path) -> Kwargs:
    """Write a file of 16-bit tokens, in which a token is its position."""
    np.arange(LENGTH * 16, dtype=np.uint16).tofile(folder / "tokens.bin")
    return {"path": str(folder / "tokens.bin"), "block": 16}


def jpegs(folder: Path) -> Kwargs:
    """Write a JPEG file per sample."""
    from PIL import Image

    files = [folder / f"{index}.jpg" for index in range(LENGTH)]
    for path, image in zip(files, images, strict=True):
        Image.fromarray(image).save(path)
    return {"files": [str(path) for path in files]}


def audio(folder: Path) -> Kwargs:
    """Write a WAV file per sample, some shorter than a clip."""
    files = [folder / f"{index}.wav" for index in range(LENGTH)]
    for index, path in enumerate(files):
        wave = np.sin(np.arange(60 + 8 * index) * (index + 1) / 50)
        import_module("soundfile").write(path, wave, 8000)
    return {"files": [str(path) for path in files], "frames": 100}


def video(folder: Path) -> Kwargs:
    """Write a short video per sample."""
    av = import_module("av")
    files = [folder / f"{index}.mp4" for index in range(LENGTH)]
    for index, path in enumerate(files):
        with av.open(str(path), "w") as container:
            stream = container.add_stream("mpeg4", rate=24, width=32, height=32, pix_fmt="yuv420p")
            for number in range(6):
                picture = np.full((32, 32, 3), 10 * index + number, np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode())
    return {"files": [str(path) for path in files], "frames": 4}


def graphs(folder: Path) -> Kwargs:
    """Write graphs of different sizes."""
    import torch

    data = import_module("torch_geometric.data").Data
    rings = []
    for index in range(LENGTH):
        nodes = torch.arange(3 + index % 4)
        rings.append(data(x=torch.rand(len(nodes), 2), edge_index=torch.stack([nodes, nodes.roll(1)]), y=index))
    torch.save(rings, folder / "graphs.pt")
    return {"path": str(folder / "graphs.pt")}


def tensors(folder: Path) -> Kwargs:
    """Write a tuple of two tensors."""
    import torch

    torch.save((torch.from_numpy(images), torch.from_numpy(labels)), folder / "tensors.pt")
    return {"path": str(folder / "tensors.pt")}
