"""Messages between the server and its workers arrive as they were sent."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teleloader_server.loading.tasks import CacheCounts, GroupReport
from teleloader_server.workers import messages
from teleloader_server.workers.channel import Channel
from teleloader_server.workers.messages import Done, Load, Message, decode, encode

small = st.integers(0, 2**40)
anything = st.none() | st.booleans() | small | st.text(max_size=5)
times = st.lists(st.lists(st.floats(0)))
substituted = st.lists(st.tuples(small, st.just([1, [[0, None, 5, "ValueError: x"]]])).map(list))
slow = st.lists(st.tuples(small, st.lists(st.tuples(small, st.floats(0)).map(list))).map(list))
reports = st.builds(
    GroupReport, st.lists(small), failed=st.booleans(), stages=times, cpu_wait=st.floats(0), cpu=st.floats(0),
    ended=st.lists(st.floats(0)),
    substituted=substituted, slowest=st.lists(st.none() | small), slow=slow, lengths=st.tuples(small, small),
    cache=st.builds(CacheCounts, small, small, st.floats(0)),
)  # fmt: skip
STRATEGIES = {
    "int": small,
    "str": st.text(max_size=9),
    "bytes | None": st.none() | st.binary(max_size=9),
    "Sequence[int]": st.lists(small),
    "Sequence[str]": st.lists(st.text(max_size=9)),
    "Sequence[Any]": st.lists(anything),
    "Sequence[Any] | None": st.none() | st.lists(anything),
    "Mapping[str, Any]": st.dictionaries(st.text(max_size=5), anything),
    "Mapping[str, Any] | None": st.none() | st.dictionaries(st.text(max_size=5), anything),
    "Sequence[Mapping[str, Any]]": st.lists(st.dictionaries(st.text(max_size=5), anything)),
    "bytes | int": st.binary(max_size=9) | small,
    "Sequence[tuple[int, Sequence[Any]]]": substituted,
    "GroupReport": reports,
}


def fields(kind: Any) -> dict[str, st.SearchStrategy[Any]]:
    """Return a strategy for each field, by its annotation."""
    return {name: STRATEGIES[hint.__forward_arg__] for name, hint in kind.__annotations__.items()}


@pytest.mark.parametrize("kind", get_args(Message), ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_a_message_is_decoded_as_it_was_encoded(kind: Any, data: st.DataObject) -> None:
    """A message arrives through a channel with its type and the types of its fields."""
    message = data.draw(st.builds(kind, **fields(kind)))
    ours, theirs = Channel.pair()
    other = Channel(theirs)
    try:
        ours.send(encode(message))
        (received,) = map(decode, other.receive())
    finally:
        ours.close()
        other.close()
    assert received == message
    assert type(received) is kind
    if isinstance(received, Done):
        assert type(received.report) is GroupReport
        assert type(received.report.cache) is CacheCounts


def test_each_message_has_a_code() -> None:
    """Each message has a code, in contrast to parts of messages."""
    defined = {
        found for found in vars(messages).values()
        if isinstance(found, type) and issubclass(found, tuple) and found.__module__ == messages.__name__
    }  # fmt: skip
    assert defined == set(get_args(Message))


def test_a_large_index_list_is_not_copied() -> None:
    """The index list is the last item, as `Channel.put` requires."""
    assert list(get_type_hints(Load))[-1] == "indices"
    indices = b"x" * 100
    assert encode(Load(1, "key", 2, 3, 1, 1, 0, [], indices))[-1] is indices
