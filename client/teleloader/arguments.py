"""Argument validation for `DataLoader`, with the errors and warnings of torch's DataLoader, without importing torch.

If several arguments are invalid, the first check determines the error. `check` therefore runs the checks in the order
of torch 2.13, whose constructor creates the samplers last and leaves some checks to them. Conditions are written as in
torch, so that values of a wrong type raise the same errors, too.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterable, Sized
from dataclasses import dataclass
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from teleloader_shared.messages import MAX_RUN_NAME, RUN_CHARACTERS, RUN_NAME, RUN_NAME_RULE


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """DataLoader arguments to validate, under torch's names, and properties of the dataset.

    Arguments that torch's constructor does not validate are omitted, such as `collate_fn` and `pin_memory`.
    """

    dataset: Sized
    """Dataset of the loader; ``len(dataset)`` is called only to shuffle, as in torch."""
    batch_size: int | None
    shuffle: bool | None
    sampler: Iterable[Any] | None
    batch_sampler: Iterable[Any] | None
    num_workers: int
    drop_last: object
    timeout: float
    multiprocessing_context: object
    prefetch_factor: int | None
    persistent_workers: bool
    iterable: bool
    """True if the dataset is iterable-style, such as torch's `IterableDataset`."""
    cpus: int
    """CPUs that the server's workers can use."""


def check(arguments: Arguments) -> None:
    """Validate loader arguments, with the errors and warnings of torch's constructor.

    Warnings point to the caller of the function that calls this one.

    Raises:
        ValueError: If values are out of range or mutually exclusive, and for some values of a wrong type.
        TypeError: If a value has a wrong type.
    """
    _check_workers(arguments)
    _check_multiprocessing_context(arguments)
    if arguments.iterable:
        _check_iterable(arguments)
    # for an iterable-style dataset, `_check_iterable` raised an error if shuffle is true
    shuffle = not arguments.iterable and bool(arguments.shuffle)
    _check_exclusions(arguments, shuffle=shuffle)
    _check_samplers(arguments, shuffle=shuffle)
    warn_of_too_many_workers(arguments.num_workers, arguments.cpus, stacklevel=4)


def warn_of_too_many_workers(num_workers: int, cpus: int, *, stacklevel: int = 3) -> None:
    """Warn if there are more workers than CPUs; called by the constructor and at each ``iter()``, as in torch.

    Args:
        num_workers: The loader's `num_workers` argument.
        cpus: CPUs that the server's workers can use.
        stacklevel: Stack level of the warning; by default it points to the caller of the calling method.
    """
    if num_workers > cpus:
        warnings.warn(
            f"This DataLoader will create {num_workers} worker processes in total. Our suggested max number of worker "
            f"in current system is {cpus}, which is smaller than what this DataLoader is going to create. Please be "
            "aware that excessive worker creation might get DataLoader running slow or even freeze, lower the worker "
            "number to avoid potential slowness/freeze if necessary.",
            stacklevel=stacklevel,
        )


def check_iteration(num_workers: int, timeout: float, prefetch_factor: int | None) -> None:
    """Validate the arguments that torch validates at ``iter()``.

    Raises:
        AssertionError: If `timeout` is set without workers, or `prefetch_factor` is 0 with workers.
    """
    if num_workers == 0 and timeout != 0:
        raise AssertionError("_SingleProcessDataLoaderIter requires timeout == 0")
    if num_workers > 0 and prefetch_factor is not None and prefetch_factor < 1:
        raise AssertionError("prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter")


def warn_of_pinning(device: str, accelerator: Any, *, stacklevel: int = 3) -> None:
    """Issue the warnings that torch issues at ``iter()`` of a loader with ``pin_memory=True``.

    Args:
        device: The loader's `pin_memory_device` argument.
        accelerator: The torch.device that torch would pin memory for; None without an accelerator.
        stacklevel: Stack level of the warnings; by default they point to the caller of the calling method.
    """
    # the texts are torch's
    if device:
        warnings.warn(
            "pin_memory_device is deprecated, the current accelerator will be used as the device,"
            f"ignore pin_memory_device='{device}'.",
            stacklevel=stacklevel,
        )
    if accelerator is None:
        warnings.warn(
            "'pin_memory' argument is set as true but no accelerator is found, "
            "then device pinned memory won't be used.",
            stacklevel=stacklevel,
        )
    elif accelerator.type == "mps":
        warnings.warn(
            "'pin_memory' argument is set as true but not supported on MPS now, device pinned memory won't be used.",
            stacklevel=stacklevel,
        )


def check_ranks(
    seed: int | None, rank: int | None, world_size: int | None, *, sampler: object, generator: object
) -> None:
    """Validate the teleloader-specific arguments `seed`, `rank` and `world_size`.

    Raises:
        ValueError: If the arguments are inconsistent, or combined with a sampler or generator.
    """
    drawn = sampler is not None or generator is not None
    if rank and world_size is None:
        raise ValueError(f"rank={rank} requires world_size: pass the number of ranks that share the epoch")
    if seed is not None and drawn:
        raise ValueError(
            "seed option is mutually exclusive with sampler, batch_sampler and generator: remove seed, or these options"
        )
    if drawn and (rank is not None or world_size is not None):
        raise ValueError(
            "rank and world_size options are mutually exclusive with sampler, batch_sampler and generator: remove rank "
            "and world_size (a DistributedSampler divides the epoch among ranks), or pass seed= instead of the others"
        )


def check_mesh(
    mesh: object,
    data_dims: object,
    rank: int | None,
    world_size: int | None,
    *,
    in_process: bool,
    sampler: object,
    generator: object,
) -> None:
    """Validate the arguments that exclude `mesh`, or require it.

    Raises:
        ValueError: If arguments exclude each other, or the calling thread loads the dataset.
    """
    if mesh is None:
        if data_dims is not None:
            raise ValueError(f"data_dims={data_dims!r} requires mesh=: it names dims of the mesh")
        return
    if rank is not None or world_size is not None:
        raise ValueError("mesh option is mutually exclusive with rank and world_size: the mesh determines both")
    if sampler is not None or generator is not None:
        raise ValueError(
            "mesh option is mutually exclusive with sampler, batch_sampler and generator: all ranks that receive the "
            "same batches must compute the same order. Pass seed="
        )
    if in_process:
        raise ValueError(
            "mesh requires batches from a server, which one rank can broadcast: pass a RemoteDataset, or num_workers=1 "
            "or more"
        )


def run_name(name: str | None) -> str | None:
    """Return the name of the training run: the argument, or the file name of the script.

    Raises:
        ValueError: If the argument is not a valid name.
    """
    if name is not None:
        if not isinstance(name, str) or RUN_NAME.fullmatch(name) is None:
            raise ValueError(f"invalid name {name!r:.100}: expected {RUN_NAME_RULE}")
        return name
    script = Path(sys.argv[0] if sys.argv else "")
    found = script.parent.name if script.stem == "__main__" else script.name  # python -m package
    found = re.sub(f"[^{RUN_CHARACTERS}]", "_", found)[:MAX_RUN_NAME]
    return found if RUN_NAME.fullmatch(found) else None


def check_errors(on_error: str, max_errors: float, *, iterable: bool) -> None:
    """Validate the teleloader-specific arguments `on_error` and `max_errors`; the spec validates the others.

    Raises:
        ValueError: If `max_errors` is not in [0, 1], or `on_error` is not supported for an iterable-style dataset.
    """
    if not 0 <= max_errors <= 1:
        raise ValueError(f"max_errors must be a fraction in [0, 1], got {max_errors!r}")
    if iterable and on_error != "raise":
        raise ValueError(
            f"on_error={on_error!r} requires a map-style dataset: an iterable-style dataset cannot continue after an "
            "exception. Catch the exception in the dataset"
        )


def check_shuffle_buffer(size: int | None, *, iterable: bool) -> None:
    """Validate the teleloader-specific argument `shuffle_buffer_size`; the spec validates its range.

    Raises:
        ValueError: If `size` is given for a map-style dataset.
    """
    if size is not None and not iterable:
        raise ValueError(
            f"shuffle_buffer_size={size!r} requires an iterable-style dataset: pass shuffle=True, which shuffles the "
            "whole map-style dataset"
        )


def check_mixture(seed: int | None, *, sampler: object) -> None:
    """Validate the arguments of a loader of a `Mixture`.

    Raises:
        ValueError: If `seed` is None, or a sampler is given.
    """
    if sampler is not None:
        raise ValueError(
            "a Mixture excludes sampler and batch_sampler, because its weights determine the order: omit them"
        )
    if seed is None:
        raise ValueError("a Mixture requires seed=, such as seed=0: its order is computed from the seed")


def check_lengths_order(name: str, seed: int | None, *, sampler: object, iterable: bool, mixture: bool) -> None:
    """Validate the arguments of a loader whose order depends on lengths.

    Args:
        name: Argument that requires lengths: ``balance`` or ``packing``.
        seed: The loader's `seed` argument.
        sampler: The loader's `sampler` or `batch_sampler` argument.
        iterable: Whether the dataset is iterable-style.
        mixture: Whether the dataset is a `Mixture`.

    Raises:
        ValueError: If `seed` is None, a sampler is given, or the dataset is iterable-style or a `Mixture`.
    """
    if mixture:
        raise ValueError(f"{name} excludes a Mixture, whose weights determine the batches: pass a RemoteDataset")
    if iterable:
        raise ValueError(
            f"{name} requires a map-style dataset, because an iterable-style dataset determines its order: omit "
            f"{name}, or define __getitem__ and __len__ in the dataset"
        )
    if sampler is not None:
        raise ValueError(f"{name} excludes sampler and batch_sampler: the lengths determine the batches. Omit them")
    if seed is None:
        raise ValueError(f"{name} requires seed=, such as seed=0: the order is computed from the seed")


def check_token_batches(batch_size: int | None, *, drop_last: object) -> None:
    """Validate the arguments of a loader with `max_tokens`.

    Raises:
        ValueError: If `batch_size` or `drop_last` is given.
    """
    if batch_size != 1 or drop_last:
        raise ValueError(
            f"max_tokens excludes batch_size={batch_size} and drop_last={drop_last}, because it determines the sizes "
            "of the batches: omit both"
        )


def as_context(context: Any) -> Any:
    """Convert a start method to a multiprocessing context, as torch does; return other values unchanged."""
    return get_context(context) if isinstance(context, str) else context


def _check_workers(arguments: Arguments) -> None:
    num_workers, prefetch_factor = arguments.num_workers, arguments.prefetch_factor
    if num_workers < 0:
        raise ValueError("num_workers option should be non-negative; use num_workers=0 to disable multiprocessing.")
    if arguments.timeout < 0:
        raise ValueError("timeout option should be non-negative")
    if num_workers == 0 and prefetch_factor is not None:
        raise ValueError(
            "prefetch_factor option could only be specified in multiprocessing."
            "let num_workers > 0 to enable multiprocessing, otherwise set prefetch_factor to None."
        )
    if prefetch_factor is not None and prefetch_factor < 0:
        raise ValueError("prefetch_factor option should be non-negative")
    if arguments.persistent_workers and num_workers == 0:
        raise ValueError("persistent_workers option needs num_workers > 0")


def _check_multiprocessing_context(arguments: Arguments) -> None:
    context = arguments.multiprocessing_context
    if context is None:
        return
    if not arguments.num_workers > 0:
        raise ValueError(
            "multiprocessing_context can only be used with multi-process loading (num_workers > 0), but got "
            f"num_workers={arguments.num_workers}"
        )
    if isinstance(context, str):
        if context not in get_all_start_methods():
            raise ValueError(
                "multiprocessing_context option should specify a valid start method in "
                f"{get_all_start_methods()!r}, but got multiprocessing_context={context!r}"
            )
    elif not isinstance(context, BaseContext):
        raise TypeError(
            "multiprocessing_context option should be a valid context object or a string specifying the start method, "
            f"but got multiprocessing_context={context}"
        )


def _check_iterable(arguments: Arguments) -> None:
    expected = "DataLoader with IterableDataset: expected unspecified"
    # as in torch, 0 passes, and a value that is not hashable raises TypeError
    if arguments.shuffle not in {False, None}:
        error = ValueError(f"{expected} shuffle option, but got shuffle={arguments.shuffle}")
        error.add_note("To shuffle the samples of an iterable-style dataset in a buffer, pass shuffle_buffer_size=.")
        raise error
    if arguments.sampler is not None:
        raise ValueError(f"{expected} sampler option, but got sampler={arguments.sampler}")
    if arguments.batch_sampler is not None:
        raise ValueError(f"{expected} batch_sampler option, but got batch_sampler={arguments.batch_sampler}")


def _check_exclusions(arguments: Arguments, *, shuffle: bool) -> None:
    sampler, batch_size, drop_last = arguments.sampler, arguments.batch_size, arguments.drop_last
    if sampler is not None and shuffle:
        raise ValueError("sampler option is mutually exclusive with shuffle")
    if arguments.batch_sampler is not None:
        if batch_size != 1 or shuffle or sampler is not None or drop_last:
            raise ValueError(
                "batch_sampler option is mutually exclusive with batch_size, shuffle, sampler, and drop_last"
            )
    elif batch_size is None and drop_last:
        raise ValueError("batch_size=None option disables auto-batching and is mutually exclusive with drop_last")


def _check_samplers(arguments: Arguments, *, shuffle: bool) -> None:
    """Perform the checks of torch's RandomSampler and, without a `batch_sampler`, of its BatchSampler."""
    batch_size, drop_last = arguments.batch_size, arguments.drop_last
    if shuffle and len(arguments.dataset) == 0:
        raise ValueError("num_samples should be a positive integer value, but got num_samples=0")
    if batch_size is None or arguments.batch_sampler is not None:
        return
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size <= 0:
        raise ValueError(f"batch_size should be a positive integer value, but got batch_size={batch_size}")
    if not isinstance(drop_last, bool):
        raise ValueError(f"drop_last should be a boolean value, but got drop_last={drop_last}")
