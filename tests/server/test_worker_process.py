"""The server's view of a worker process: its current task, and the stacks of one that hangs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from teleloader_server.loading.tasks import Task
from teleloader_server.workers.channel import Channel
from teleloader_server.workers.handle import WorkerHandle, _without_own_frames
from teleloader_server.workers.messages import CURRENT_TASK, REVOKED
from teleloader_server.workers.worker import Worker
from teleloader_shared.codec import BatchId
from teleloader_shared.spec import LoaderSpec


def task(batch: int) -> Task:
    """Return the task of a batch."""
    return Task(LoaderSpec(dataset="data"), 100, BatchId("key", 0, batch))


@pytest.fixture
def process() -> Iterator[WorkerHandle]:
    """Yield a worker that is ready and has tasks 7, 8 and 9 for the batches with these numbers."""
    channel, theirs = Channel.pair()
    found = WorkerHandle(0, channel)
    status = os.memfd_create("status")
    os.write(status, CURRENT_TASK.pack(-1) + REVOKED.pack(-1))
    found.take_status_file(status)
    found.health.ready = True
    found.health.tasks = {number: task(number) for number in (7, 8, 9)}
    yield found
    found.close()
    theirs.close()


def begin(process: WorkerHandle, task_id: int) -> None:
    """Write the current task to the worker's status file."""
    assert process._status_file is not None
    os.pwrite(process._status_file, CURRENT_TASK.pack(task_id), 0)


def test_the_status_file_contains_the_current_task(process: WorkerHandle) -> None:
    """The current task may not be the first one, if that has finished and its report has not arrived."""
    assert process.current_task() is None
    begin(process, 8)
    assert process.current_task() == task(8)
    assert process.queued() == [task(7), task(9)]
    begin(process, 6)
    assert process.current_task() is None
    assert process.queued() == [task(7), task(8), task(9)]


def test_what_is_taken_back_is_noted_for_the_worker(process: WorkerHandle) -> None:
    """The worker skips the revoked tasks that it has not started; the server removes them."""
    begin(process, 7)
    process.revoke(process.queued())
    assert process._status_file is not None
    assert REVOKED.unpack(os.pread(process._status_file, REVOKED.size, CURRENT_TASK.size)) == (9,)
    assert process.health.tasks == {7: task(7)}


async def test_a_worker_that_had_not_started_has_no_stack() -> None:
    """The text states that the worker had not started."""
    channel, theirs = Channel.pair()
    process = WorkerHandle(0, channel)
    assert await process.stacks() == "(the worker had not started)"
    process.close()
    theirs.close()


def test_stacks_end_at_our_code() -> None:
    """Each thread's stack ends where teleloader's frames begin, and threads without user code are omitted."""
    ours = f'  File "{os.path.dirname(os.path.abspath(Channel.pair.__code__.co_filename))}/'
    text = f"""\
Thread 0x1 (most recent call first):
  File "wait.py", line 1 in wait
{ours}worker.py", line 2 in f
{ours}worker.py", line 3 in g
  File "threading.py", line 4 in run

Current thread 0x2 (most recent call first):
  File "user.py", line 5 in h
{ours}worker.py", line 6 in i
{ours}worker.py", line 7 in j

Thread 0x3 (most recent call first):
  File "threading.py", line 8 in wait
{ours}worker.py", line 9 in {Worker.report_late.__name__}
"""
    kept = [line.rpartition(" ")[2] for line in _without_own_frames(text).splitlines()]
    assert kept == ["first):", "wait", "f", "", "first):", "h", "i"]
