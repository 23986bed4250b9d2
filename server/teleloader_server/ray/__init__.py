"""Fleets of servers on a Ray cluster. Ray places and restarts the servers; batches do not pass through Ray.

    up("loaders", "my_package.data:train", servers=2, num_workers=8)
    dataset = connect("loaders").dataset("train")  # in any driver, task or actor of the cluster

Start reading in `fleet`. Its actors (`actors`) start the command ``teleloader-server`` as child processes (`process`).
The only package that imports Ray.
"""

from __future__ import annotations

from teleloader_server.ray.fleet import Fleet, connect, up

__all__ = ["Fleet", "connect", "up"]
