"""The loader server of teleloader: hosts datasets, and workers that turn them into batches.

    with serve(my_dataset, num_workers=2) as url: ...

Importing this does not load the web server, because every worker would.
"""

from __future__ import annotations

from teleloader_server.config import ConfigError
from teleloader_server.loading.collate import default_collate, default_convert
from teleloader_server.loading.worker_info import WorkerInfo, get_worker_info
from teleloader_server.serving import serve

__all__ = ["ConfigError", "WorkerInfo", "default_collate", "default_convert", "get_worker_info", "serve"]
