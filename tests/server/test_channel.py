"""Messages and descriptors between processes: complete, in order, and without blocking forever."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teleloader_server.workers.channel import Channel
from tests.conftest import examples
from tests.server.test_arena import open_descriptors


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    """Yield a non-blocking end and a blocking end."""
    ours, theirs = Channel.pair()
    other = Channel(theirs)
    yield ours, other
    ours.close()
    other.close()


@pytest.fixture
def raw() -> Iterator[tuple[Channel, socket.socket]]:
    """Yield a channel, and the socket of its other end."""
    ours, theirs = Channel.pair()
    yield ours, theirs
    ours.close()
    theirs.close()


def received(channel: Channel, count: int) -> list[Any]:
    """Wait for the next `count` messages; return them."""
    messages: list[Any] = []
    while len(messages) < count:
        select.select([channel], [], [])
        messages += channel.receive()
    return messages


def pipe_that_says(text: bytes) -> int:
    """Return a descriptor from which `text` can be read."""
    reader, writer = os.pipe()
    os.write(writer, text)
    os.close(writer)
    return reader


def read_and_close(fd: int) -> bytes:
    """Return the content of a descriptor, and close it."""
    with open(fd, "rb") as file:
        return file.read()


# --- Messages -----------------------------------------------------------------------------------------------------

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@settings(max_examples=examples(100))
@given(messages=st.lists(values, min_size=1, max_size=5), cuts=st.lists(st.integers(1, 50)))
def test_messages_come_whole_and_in_order_however_they_are_cut(messages: list[Any], cuts: list[int]) -> None:
    """Partial messages are kept until they are complete, and several in one read are separated."""
    ours, theirs = Channel.pair()
    stream = b"".join(msgpack.packb(message) for message in messages)
    got: list[Any] = []
    for cut in [*cuts, len(stream)]:
        piece, stream = stream[:cut], stream[cut:]
        if piece:
            theirs.sendall(piece)
            got += ours.receive()
    assert got == messages
    ours.close()
    theirs.close()


def test_a_part_of_a_message_is_no_message(raw: tuple[Channel, socket.socket]) -> None:
    """Nothing is returned before a message is complete."""
    channel, other = raw
    packed = msgpack.packb(["task", 1])
    other.sendall(packed[:3])
    assert channel.receive() == []
    other.sendall(packed[3:] + packed)
    assert channel.receive() == [["task", 1], ["task", 1]]


def test_both_ends_talk(pair: tuple[Channel, Channel]) -> None:
    """Each end receives the other end's messages."""
    ours, other = pair
    ours.send(["to you"])
    other.send(["to me"])
    assert received(other, 1) == [["to you"]]
    assert received(ours, 1) == [["to me"]]


def test_a_channel_that_does_not_block_says_that_nothing_has_come(pair: tuple[Channel, Channel]) -> None:
    """Without data, receive() returns immediately, so that the event loop is not blocked."""
    with pytest.raises(BlockingIOError):
        pair[0].receive()


def test_a_large_message_arrives(pair: tuple[Channel, Channel]) -> None:
    """`send` waits until a message that exceeds the socket's buffer is sent, also on a non-blocking socket."""
    ours, other = pair
    message = ["done", b"x" * 10_000_000]
    got: list[Any] = []
    reader = threading.Thread(target=lambda: got.extend(received(other, 1)))
    reader.start()
    ours.send(message)
    reader.join()
    assert got == [message]
    with pytest.raises(BlockingIOError):
        ours.receive()  # it blocks no more than before


def test_a_large_bytes_object_is_not_copied(pair: tuple[Channel, Channel]) -> None:
    """A large object is sent in place, in any number of system calls, because copies would block the event loop."""
    ours, other = pair
    large = bytes(10_000_000)
    tracemalloc.start()
    try:
        ours.put(["task", 1, large])
        ours.put("after it")
        assert not ours.flush()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000
    got: list[Any] = []
    reader = threading.Thread(target=lambda: got.extend(received(other, 2)))
    reader.start()
    while reader.is_alive():
        ours.flush()
    assert got == [["task", 1, large], "after it"]


def test_what_was_put_is_sent_with_the_next_flush(pair: tuple[Channel, Channel]) -> None:
    """One system call sends many messages."""
    ours, other = pair
    for number in range(3):
        ours.put(number)
    os.set_blocking(other.fileno(), False)
    with pytest.raises(BlockingIOError):
        other.receive()
    assert ours.flush()
    assert other.receive() == [0, 1, 2]
    assert ours.flush(), "nothing to send is sent"


def test_what_was_put_goes_before_what_is_sent(pair: tuple[Channel, Channel]) -> None:
    """Messages are sent in the order in which they were passed to put() and send()."""
    ours, other = pair
    ours.put("first")
    ours.send("second")
    assert received(other, 2) == ["first", "second"]


def test_a_full_socket_takes_the_rest_later(pair: tuple[Channel, Channel]) -> None:
    """`flush` returns False if data remain, and continues where it stopped once the socket is writable."""
    ours, other = pair
    messages = [[number, "x" * 1000] for number in range(3000)]
    for message in messages:
        ours.put(message)
    assert not ours.flush()
    got: list[Any] = []
    while not ours.flush():
        while not select.select([], [ours], [], 0)[1]:
            got += other.receive()
    got += received(other, len(messages) - len(got))
    assert got == messages


def test_sending_keeps_the_mode_of_the_socket(pair: tuple[Channel, Channel]) -> None:
    """`receive` must not block in another process that shares the socket with a process that waits to send."""
    ours, other = pair
    messages = [[number, "x" * 1000] for number in range(3000)]
    for message in messages:
        ours.put(message)
    sender = threading.Thread(target=ours.send, args=("last",))
    sender.start()
    got: list[Any] = []
    modes = set()
    while len(got) < len(messages) + 1:
        modes.add(os.get_blocking(ours.fileno()))
        got += other.receive()
    sender.join()
    assert got == [*messages, "last"]
    assert modes == {False}


# --- Descriptors --------------------------------------------------------------------------------------------------


def test_a_descriptor_travels_beside_its_message(pair: tuple[Channel, Channel]) -> None:
    """The receiver gets its own descriptor, and the sender may close the original."""
    ours, other = pair
    fd = pipe_that_says(b"hello")
    ours.send(["slot", 1], [fd])
    os.close(fd)
    assert received(other, 1) == [["slot", 1]]
    assert read_and_close(other.take_fd()) == b"hello"


def test_descriptors_come_in_the_order_of_their_messages(pair: tuple[Channel, Channel]) -> None:
    """Descriptors keep their order among messages without any, and when many are received at once."""
    ours, other = pair
    for number in range(100):
        ours.put(["without", number])
        fd = pipe_that_says(str(number).encode())
        ours.send(["with", number], [fd])
        os.close(fd)
    got = received(other, 200)
    assert got == [[kind, number] for number in range(100) for kind in ("without", "with")]
    assert [read_and_close(other.take_fd()) for _ in range(100)] == [str(number).encode() for number in range(100)]


def test_a_descriptor_is_there_when_its_message_is(pair: tuple[Channel, Channel]) -> None:
    """The descriptor is available once its message is, in whatever pieces data arrive."""
    ours, other = pair
    for number in range(5):
        fd = pipe_that_says(str(number).encode())
        ours.send(number, [fd])
        os.close(fd)
    got = 0
    while got < 5:
        for number in other.receive():
            assert read_and_close(other.take_fd()) == str(number).encode()
            got += 1


def test_a_message_may_have_several_descriptors(pair: tuple[Channel, Channel]) -> None:
    """Descriptors arrive in the order in which they were sent."""
    ours, other = pair
    fds = [pipe_that_says(text) for text in (b"a", b"b", b"c")]
    ours.send("three", fds)
    for fd in fds:
        os.close(fd)
    assert received(other, 1) == ["three"]
    assert [read_and_close(other.take_fd()) for _ in range(3)] == [b"a", b"b", b"c"]


def test_a_large_message_may_have_a_descriptor(pair: tuple[Channel, Channel]) -> None:
    """A message that exceeds the socket's buffer arrives with its descriptor, and further messages after it."""
    ours, other = pair
    fd = pipe_that_says(b"hello")
    got: list[Any] = []
    reader = threading.Thread(target=lambda: got.extend(received(other, 2)))
    reader.start()
    ours.send("x" * 5_000_000, [fd])
    ours.send("after")
    reader.join()
    os.close(fd)
    assert got == ["x" * 5_000_000, "after"]
    assert read_and_close(other.take_fd()) == b"hello"


def test_unused_descriptors_are_closed_with_the_channel() -> None:
    """Descriptors are also closed if a worker exits before the server has used them."""
    before = open_descriptors()
    ours, theirs = Channel.pair()
    other = Channel(theirs)
    fd = pipe_that_says(b"")
    ours.send("slot", [fd])
    os.close(fd)
    assert received(other, 1) == ["slot"]
    ours.close()
    other.close()
    assert open_descriptors() == before


# --- The end ------------------------------------------------------------------------------------------------------


def test_the_end_comes_after_all_messages(pair: tuple[Channel, Channel]) -> None:
    """Messages sent before the other end was closed are received first; then each receive() raises EOFError."""
    ours, other = pair
    other.send("last words")
    other.close()
    assert ours.receive() == ["last words"]
    for _ in range(2):
        with pytest.raises(EOFError):
            ours.receive()


def test_an_end_with_unread_messages_is_an_end(pair: tuple[Channel, Channel]) -> None:
    """A connection reset counts as the end."""
    ours, other = pair
    ours.send("never read")
    other.close()
    with pytest.raises(EOFError):
        ours.receive()


def test_a_message_that_is_cut_off_by_the_end_is_none(raw: tuple[Channel, socket.socket]) -> None:
    """A partial message of a killed process is not delivered."""
    channel, other = raw
    other.sendall(msgpack.packb(["whole"]) + msgpack.packb(["cut off"])[:-1])
    other.close()
    assert channel.receive() == [["whole"]]
    with pytest.raises(EOFError):
        channel.receive()


def test_a_message_to_a_closed_end_is_discarded(pair: tuple[Channel, Channel]) -> None:
    """Sending to a closed end is no error: the receiving side notices the end."""
    ours, other = pair
    other.close()
    ours.send("hello?")
    ours.put("hello?")
    ours.flush()
    with pytest.raises(EOFError):
        ours.receive()


def test_a_descriptor_to_a_closed_end_is_discarded(pair: tuple[Channel, Channel]) -> None:
    """A message with a descriptor is discarded, too, and the channel does not block."""
    ours, other = pair
    other.close()
    with open(os.devnull) as file:
        ours.send("hello?", [file.fileno()])
    assert not os.get_blocking(ours.fileno())


def test_a_closed_channel_has_no_descriptor(pair: tuple[Channel, Channel]) -> None:
    """fileno() is -1, as for files of Python."""
    pair[0].close()
    assert pair[0].fileno() == -1
    pair[0].close()


def test_the_end_of_a_killed_process_is_seen() -> None:
    """The end of a killed worker is reported after its messages."""
    ours, theirs = Channel.pair()
    program = """
import socket, sys
from teleloader_server.workers.channel import Channel
channel = Channel(socket.socket(fileno=int(sys.argv[1])))
channel.send("alive")
channel.receive()
"""
    with theirs:
        process = subprocess.Popen([sys.executable, "-c", program, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    assert received(ours, 1) == ["alive"]
    process.kill()
    process.wait()
    with pytest.raises(EOFError):
        ours.receive()
    ours.close()


# --- Descriptors that a fork must close ---------------------------------------------------------------------------


def test_a_forked_process_holds_no_connection_of_its_parent() -> None:
    """A fork closes inherited channels and sockets, so that their ends are noticed; the kept channel works.

    In a process of its own: it forks.
    """
    program = """
import os, socket, sys
from teleloader_server.workers.channel import Channel, close_inherited

listening = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(listening.getsockname())
served, _ = listening.accept()
datagram = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
unix, unix_end = socket.socketpair()
another, another_end = Channel.pair()
ours, theirs = Channel.pair()
descriptors = [s.fileno() for s in (listening, served, datagram)]

pid = os.fork()
if pid == 0:
    try:
        keep = Channel(theirs)
        close_inherited(keep)
        still_open = [os.readlink(f"/proc/self/fd/{fd}") for fd in descriptors]
        assert unix.send(b"x") == 1, "a Unix socket of the user's is none of ours"
        keep.send(["child", still_open])
        keep.receive()
    except EOFError:
        os._exit(0)
    finally:
        os._exit(1)

theirs.close()
os.set_blocking(ours.fileno(), True)
messages = []
while not messages:
    messages = ours.receive()
assert messages == [["child", ["/dev/null"] * 3]], messages
assert unix_end.recv(1) == b"x"
# the child lives, and yet the ends of what the parent closes are seen
served.close()
assert client.recv(1) == b""
another.close()
assert another_end.recv(1) == b""
address = listening.getsockname()
listening.close()
try:
    socket.create_connection(address)
except ConnectionRefusedError:
    pass
else:
    raise SystemExit("somebody still listens")
ours.close()
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""
    subprocess.run([sys.executable, "-c", program], check=True)
