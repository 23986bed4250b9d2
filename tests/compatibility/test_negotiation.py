"""Negotiation of the protocol version."""

from __future__ import annotations

import httpx
import pytest

from teleloader import DataLoader, RemoteDataset, VersionMismatch
from teleloader_server import serve
from teleloader_shared import messages
from teleloader_shared.messages import PROTOCOL_HEADER, check_protocol, format_protocols, select_protocol


@pytest.fixture
def three_and_four(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the versions of this release."""
    monkeypatch.setattr(messages, "PROTOCOL_VERSIONS", (3, 4))


@pytest.mark.usefixtures("three_and_four")
@pytest.mark.parametrize(
    ("offered", "selected"), [("3", 3), ("4", 4), ("4, 3", 4), ("3,4", 4), ("5, 4, 3", 4), ("3, 2, 1", 3), (" 4 ,9", 4)]
)
def test_the_highest_common_version_is_selected(offered: str, selected: int) -> None:
    """The order of the offered versions has no meaning."""
    assert select_protocol(offered) == selected
    assert format_protocols() == "4, 3"


@pytest.mark.usefixtures("three_and_four")
@pytest.mark.parametrize(
    ("offered", "side"),
    [
        ("5", "server"),
        ("2, 6", "server"),
        ("2, 1", "client"),
        (None, "client"),
    ],
)
def test_without_a_common_version_the_error_names_the_side_to_update(offered: str | None, side: str) -> None:
    """A client without the header uses version 1, the version of clients that send one number or none."""
    with pytest.raises(VersionMismatch, match=f"this server supports 3, 4. Update the {side}$"):
        select_protocol(offered)


@pytest.mark.parametrize("offered", ["", ",", "x", "0", "-1", "1.0", "1, x", "9" * 400, "\u0661"])
def test_an_invalid_header_is_refused(offered: str) -> None:
    """The error has the value, and an example."""
    with pytest.raises(VersionMismatch, match=r"invalid header Teleloader-Protocol: .*expected versions such as '1'"):
        select_protocol(offered)


@pytest.mark.usefixtures("three_and_four")
def test_a_client_refuses_a_version_that_it_did_not_offer() -> None:
    """The error names the side to update."""
    check_protocol(3, "http://server")
    with pytest.raises(VersionMismatch, match="version 5, and this client supports 3, 4"):
        check_protocol(5, "http://server")
    with pytest.raises(VersionMismatch, match="Update the server"):
        check_protocol(2, "http://server")


def test_the_server_answers_with_the_selected_version() -> None:
    """Registrations and their renewal contain the selected version; status 426 without a common one."""
    offer = {PROTOCOL_HEADER: "7, 1"}
    with serve([1, 2, 3], num_workers=0) as url, httpx.Client(base_url=url, headers=offer) as send:
        found = send.post("/v1/loaders", json={"dataset": "dataset"}).json()
        assert found["protocol"] == 1
        assert send.get(f"/v1/loaders/{found['key']}").json()["protocol"] == 1
        refused = send.post("/v1/loaders", json={"dataset": "dataset"}, headers={PROTOCOL_HEADER: "7, 8"})
        assert (refused.status_code, refused.json()["code"]) == (426, "VersionMismatch")


def test_client_and_server_with_several_versions_work_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch is complete with any common version."""
    with serve([1, 2, 3], num_workers=0) as url:
        loader = DataLoader(RemoteDataset(url), output="numpy")
        for versions in ((1,), (1, 2), (3, 1)):
            monkeypatch.setattr(messages, "PROTOCOL_VERSIONS", versions)
            assert len(list(loader)) == 3
