"""Server of teleloader: hosts datasets, and computes their batches in worker processes.

    with serve(my_dataset, num_workers=2) as url: ...

Importing this package does not import the web server: every worker imports the package, and none needs the web server.
"""

from __future__ import annotations

from teleloader_server.config import ConfigError
from teleloader_server.loading.collate import default_collate, default_convert
from teleloader_server.loading.sample_cache import CachedDataset
from teleloader_server.loading.worker_info import WorkerInfo, get_worker_info
from teleloader_server.serving import serve
from teleloader_shared.registry import register

__all__ = [
    "CachedDataset",
    "ConfigError",
    "WorkerInfo",
    "default_collate",
    "default_convert",
    "get_worker_info",
    "register",
    "serve",
]
