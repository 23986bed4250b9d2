"""Construction of configured datasets, and the record `HostedDataset`."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import json
import os
import stat
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from teleloader_server.config import ConfigError, DatasetConfig, IndexKind
from teleloader_server.limits import default_num_workers
from teleloader_server.loading.collate import default_convert, lazy_collate, path_to_uncollatable
from teleloader_server.loading.random_state import seed_all
from teleloader_shared.lengths import Lengths
from teleloader_shared.messages import DatasetInfo
from teleloader_shared.orders.seeding import derive_seed
from teleloader_shared.sources import Sources, describe
from teleloader_shared.spec import DEFAULT_COLLATE

_MAX_TEXT: Final = 64 * 1024
_FACTORY_SEED: Final = derive_seed("dataset")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostedDataset:
    """Constructed dataset, with the functions and settings that a worker needs to compute batches."""

    info: DatasetInfo
    dataset: Any
    collate: Callable[[list[Any]], Any] | None
    """Collate function; None uses default_collate for batches, and default_convert for single samples, as in torch."""
    worker_init: Callable[[int], None] | None
    functions: Mapping[str, Callable[..., Any]]
    """Functions that clients may select in place of `collate` and `worker_init`, by name."""
    indices: IndexKind = "any"
    """See `DatasetConfig.indices`."""
    default_collate: Callable[[list[Any]], Any] = lazy_collate
    """Function that collates samples into a batch if no other function is selected."""
    default_convert: Callable[[Any], Any] = default_convert
    """Function that converts a single sample (``batch_size=None``) if no other function is selected."""
    lengths: Lengths | None = None
    """Lengths of the samples (`sample_lengths` of the dataset); None if the dataset has none."""
    parts: Sequence[HostedDataset] = ()
    """Sources of a mixture that was combined from hosted datasets; empty for any other dataset."""

    def collate_batch(self, samples: list[Any], name: str | None = None) -> Any:
        """Collate samples into a batch.

        Args:
            samples: Samples of the batch; not empty.
            name: Name of the collate function that the client selected; None for the dataset's own.
        """
        collate = self._collate_named(name)
        if collate is not None:
            return collate(samples)
        try:
            return self.default_collate(samples)
        except TypeError as error:
            # torch's message names the type but not the location of the value
            place = path_to_uncollatable(samples[0])
            if place is not None:
                error.add_note(f"The value is {place}.")
            raise

    def gives_batches(self, name: str | None = None) -> bool:
        """Return True if batches are fetched with the dataset's ``__getbatch__`` method, without collation.

        ``__getbatch__(indices)`` is a method specific to teleloader: it takes an int64 array of shape (batch size,) and
        returns the batch; the first dimension of the batch's arrays is the batch size. The method is not used with a
        collate function or with seeding per sample, which require single samples.
        """
        if self._collate_named(name) is not None or self.info.seeding != "batch" or self.info.kind != "map":
            return False
        return getattr(self.dataset, "__getbatch__", None) is not None

    def convert_sample(self, sample: Any, name: str | None = None) -> Any:
        """Convert a single sample for ``batch_size=None``.

        Args:
            sample: The sample.
            name: Name of the collate function that the client selected; None for the dataset's own.
        """
        collate = self._collate_named(name)
        return self.default_convert(sample) if collate is None else collate(sample)

    def _collate_named(self, name: str | None) -> Callable[[Any], Any] | None:
        """Return the selected collate function; None for the built-in one."""
        if name is None:
            return self.collate
        return None if name == DEFAULT_COLLATE else self.functions[name]

    def copied(self) -> HostedDataset:
        """Return a record with a deep copy of the dataset, or this record if the dataset cannot be copied."""
        try:
            return replace(self, dataset=deepcopy(self.dataset))
        except Exception:  # noqa: BLE001 - files, locks and generators cannot be copied
            return self

    def worker_init_of(self, name: str | None) -> Callable[[int], None] | None:
        """Return the worker-init function with the given name; for None, the dataset's own function, if any."""
        return self.worker_init if name is None else self.functions[name]


def combine(parts: Sequence[HostedDataset]) -> HostedDataset:
    """Combine hosted datasets into one dataset, the sources of a mixture.

    Raises:
        InvalidSpec: If the datasets cannot be mixed.
    """
    sources = Sources({part.info.name: part.dataset for part in parts})
    info = describe([part.info for part in parts])
    return replace(parts[0], info=info, dataset=sources, lengths=None, parts=tuple(parts))


def open_datasets(configs: Iterable[DatasetConfig]) -> dict[str, HostedDataset]:
    """Construct all configured datasets.

    Raises:
        ConfigError: If a dataset cannot be constructed; for an error in user code, the message contains the traceback.
    """
    opened = {}
    for config in configs:
        try:
            opened[config.name] = open_dataset(config)
        except Exception as error:  # noqa: BLE001 - whatever user code raises
            raise cannot_build(error, config) from None
    return opened


def cannot_build(error: Exception, config: DatasetConfig) -> ConfigError:
    """Convert an exception of `open_dataset` to a `ConfigError`, with the traceback of user code and with advice."""
    if isinstance(error, ConfigError):
        return error
    text = f"{_shown(error)[-_MAX_TEXT:]}{_advice(error, config)}"
    return ConfigError(f"cannot build dataset {config.name!r}:\n{text}")


def _shown(error: Exception) -> str:
    """Format an exception of user code with its traceback, without the frames of the server and of importlib."""
    shown = traceback.TracebackException.from_exception(error)
    ours = (__file__, importlib.__file__)
    frames = [one for one in shown.stack if one.filename not in ours and "<frozen importlib" not in one.filename]
    shown.stack = traceback.StackSummary.from_list(frames)
    return "".join(shown.format())


def _advice(error: Exception, config: DatasetConfig) -> str:
    """Return advice on a common error of a factory, or "" for other errors."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        return f"The server builds the dataset: install {package} on the server, in the Python environment {sys.prefix}"
    if isinstance(error, FileNotFoundError) and error.filename:
        return (
            f"The server builds the dataset: {error.filename} must exist on the server (current folder: {Path.cwd()})"
        )
    if isinstance(error, TypeError) and " missing " in str(error) and _raised_here(error):
        return (
            f"The server calls {config.factory} without arguments. To pass arguments, use a --config file with "
            f"[datasets.{config.name}], factory = {json.dumps(config.factory)} and kwargs = {{ ... }}"
        )
    return ""


def _raised_here(error: Exception) -> bool:
    """Return True if this module called the function whose arguments are wrong, and not the function itself."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_code.co_filename == __file__


def open_dataset(config: DatasetConfig) -> HostedDataset:
    """Import and construct a configured dataset. Exceptions raised by user code propagate unchanged.

    If several processes construct the dataset (``start_method="spawn"``), the global random generators are seeded
    first, so that a list of files that the factory shuffles has the same order in all of them.

    Raises:
        ConfigError: If the dataset cannot be imported, or the imported object is not a dataset.
    """
    is_seeded = config.start_method == "spawn"
    if is_seeded:
        seed_all(_FACTORY_SEED)
    found = resolve(config.factory, f"factory of dataset {config.name!r}")
    if is_seeded:  # again, because the import may have drawn random numbers, or imported torch
        seed_all(_FACTORY_SEED)
    if config.kwargs and not is_factory(found):
        raise ConfigError(
            f"kwargs of dataset {config.name!r} require a factory function, but {config.factory} is a dataset object: "
            "remove kwargs, or specify a function that returns the dataset"
        )
    dataset = found(**config.kwargs) if is_factory(found) else found
    return host(
        dataset,
        name=config.name,
        collate=None if config.collate is None else resolve(config.collate, f"collate of dataset {config.name!r}"),
        collate_name=config.collate or DEFAULT_COLLATE,
        worker_init=(
            None
            if config.worker_init is None
            else resolve(config.worker_init, f"worker_init of dataset {config.name!r}")
        ),
        worker_init_name=config.worker_init,
        functions={name: resolve(name, f"functions of dataset {config.name!r}") for name in config.functions},
        version=config.version,
        seeding=config.seeding,
        indices=config.indices,
    )


def host(
    dataset: Any,
    *,
    name: str,
    collate: Callable[[list[Any]], Any] | None = None,
    collate_name: str = DEFAULT_COLLATE,
    worker_init: Callable[[int], None] | None = None,
    worker_init_name: str | None = None,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    version: str = "",
    seeding: Literal["batch", "sample"] = "batch",
    indices: IndexKind = "any",
) -> HostedDataset:
    """Create the `HostedDataset` of a dataset object.

    By default, client-side samplers may send any index, as in torch; a configured dataset restricts the type of
    indices (`DatasetConfig.indices`).

    Raises:
        ConfigError: If the object is not a dataset, a function is not callable, or the lengths are invalid.
    """
    functions = functions or {}
    for what, function in (("collate", collate), ("worker_init", worker_init), *functions.items()):
        if function is not None and not callable(function):
            raise ConfigError(f"invalid {what} of dataset {name!r}: expected a callable, got {function!r:.80}")
    kind = _kind_of(dataset, name)
    length = _length_of(dataset)
    lengths = None if kind == "iterable" or length is None else _sample_lengths(dataset, name, length)
    facts = [name, kind, length, version, collate_name, seeding, *([] if lengths is None else [lengths.digest])]
    info = DatasetInfo(
        name=name,
        kind=kind,
        type=type(dataset).__name__,
        length=length,
        version=version,
        fingerprint=hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest(),
        collate=collate_name,
        worker_init=worker_init_name,
        functions=list(functions),
        seeding=seeding,
        cpus=default_num_workers(),
        lengths=None if lengths is None else lengths.digest,
        longest=None if lengths is None else lengths.longest,
        longest_sample=None if lengths is None else lengths.longest_sample,
    )
    return HostedDataset(
        info=info, dataset=dataset, collate=collate, worker_init=worker_init, functions=functions, indices=indices,
        lengths=lengths,
    )  # fmt: skip


def _kind_of(dataset: Any, name: str) -> Literal["map", "iterable"]:
    # torch's IterableDataset has a __getitem__ that always raises; getattr, because another thread may import torch now
    torchs = getattr(sys.modules.get("torch.utils.data"), "IterableDataset", None)
    if torchs is not None and isinstance(dataset, torchs):
        return "iterable"
    if hasattr(dataset, "__getitem__"):
        return "map"
    if hasattr(dataset, "__iter__"):
        return "iterable"
    raise ConfigError(
        f"dataset {name!r} must define __getitem__ and __len__, or __iter__; got {type(dataset).__qualname__}"
    )


def _length_of(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):  # torch's own datasets without a length raise either
        return None


def _sample_lengths(dataset: Any, name: str, count: int) -> Lengths | None:
    """Return the lengths that a dataset states in its attribute or method `sample_lengths`, if there is any.

    Raises:
        ConfigError: If they are invalid.
    """
    given = getattr(dataset, "sample_lengths", None)
    if callable(given):
        given = given()
    if given is None:
        return None
    known = _known.get(id(given))
    if known is not None and known[0] is given and len(known[1]) == count:
        return known[1]
    try:
        found = Lengths(given, count)
    except ValueError as error:
        raise ConfigError(f"invalid sample_lengths of dataset {name!r}: {error}") from None
    # objects of this process are described repeatedly, and hashing the lengths takes long
    _known[id(given)] = given, found
    if len(_known) > _MAX_KNOWN:
        del _known[next(iter(_known))]
    return found


_MAX_KNOWN: Final = 8
_known: Final[dict[int, tuple[Any, Lengths]]] = {}
"""Arrays for which lengths were validated, by identity; the reference keeps the identity from being reused."""


def is_factory(found: Any) -> bool:
    """Return True if the object is a class or function that creates a dataset, and not a dataset itself."""
    return isinstance(found, type) or (
        callable(found) and not hasattr(found, "__getitem__") and not hasattr(found, "__iter__")
    )


def _unreadable_folders() -> str:
    """Return a hint about folders that Python skips, because the user of this process cannot read them."""
    found = []
    for folder in filter(None, sys.path):
        try:
            is_folder = stat.S_ISDIR(Path(folder).stat().st_mode)
        except PermissionError:
            is_folder = True
        except OSError:
            is_folder = False
        if is_folder and not os.access(folder, os.R_OK | os.X_OK):
            found.append(folder)
    return f". User ID {os.geteuid()} cannot read {', '.join(found)}" if found else ""


def resolve(target: str, what: str) -> Any:
    """Import the object that ``module:name`` refers to.

    Args:
        target: ``module:name``.
        what: Description of the setting, for error messages.

    Raises:
        ConfigError: If the module does not exist, or does not define the name.
    """
    module_name, _, path = target.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # the module exists, and one of its own imports is missing
        if module_name.endswith(".py"):
            module = module_name.removesuffix(".py").replace("/", ".")
            raise ConfigError(f"{what}: expected a module, got a file. Use {module}:{path}") from None
        raise ConfigError(
            f"{what}: module {module_name!r} not found in the current folder ({Path.cwd()}) or in the Python "
            f"environment {sys.prefix}. Check the name, or install the module{_unreadable_folders()}"
        ) from None
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            near = difflib.get_close_matches(name, dir(found), 1)
            meant = f". Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{what}: module {module_name!r} has no attribute {path!r}{meant}") from None
    return found
