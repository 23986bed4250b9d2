"""``teleloader-server token``: edits of the token file, by the command and seen by a server."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest

from teleloader import DataLoader, RemoteDataset
from teleloader_server.cli import token_commands
from teleloader_shared.errors import Unauthorized
from tests.conftest import StartServer
from tests.end_to_end.terminal import SERVER, Done, piped

MANY = "tests.end_to_end.hosted:many"

WRITTEN_BY_HAND = """\
# Tokens of the cluster; ask ops before you change this.
["a.b"]  # quoted, because of its dot
sha256 = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
scopes = [
    "read:train",  # no validation data
    "stats",
]

# Operators only.
[ops]
token = "tl_aaaaaaaaaaaaaaaaaaaa"
scopes = ["admin"]
memory_share = 0.5
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return the path of a token file, which is missing."""
    return tmp_path / "tokens.toml"


def token(command: str, file: Path, *arguments: str) -> Done:
    """Run a command on the file."""
    return piped(SERVER, "token", command, *arguments, "--file", str(file))


def content(file: Path) -> dict[str, Any]:
    """Parse the file."""
    return tomllib.loads(file.read_text())


def test_add_creates_the_file_and_prints_the_token_once(file: Path) -> None:
    """Only the token is on stdout, so that a shell can assign it; the file has its SHA-256 and is its owner's alone."""
    added = token("add", file, "trainer", "--scope", "read:numbers", "--scope", "stats", "--days", "2")
    assert added.code == 0
    assert re.fullmatch(r"tl_[\w-]{43}\n", added.out)
    assert added.out.strip() not in file.read_text() + added.err
    assert file.stat().st_mode & 0o777 == 0o600
    (entry,) = content(file).values()
    assert set(entry) == {"sha256", "scopes", "expires"}
    assert entry["scopes"] == ["read:numbers", "stats"]
    assert token("add", file, "other").code == 0
    assert content(file)["other"]["scopes"] == ["read", "stats"]
    assert list(file.parent.iterdir()) == [file], "no temporary file is left"


def test_add_can_write_the_token_to_a_new_file(file: Path, tmp_path: Path) -> None:
    """The token is then not printed, and an existing file is not overwritten."""
    out = tmp_path / "token"
    added = token("add", file, "trainer", "--out", str(out))
    assert (added.code, added.out) == (0, "")
    made = out.read_text()
    assert out.stat().st_mode & 0o777 == 0o600
    for wrong in (out, file):
        refused = token("add", file, "other", "--out", str(wrong))
        assert (refused.code, "the file exists. Choose another" in refused.err) == (2, True)
    assert out.read_text() == made
    assert set(content(file)) == {"trainer"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("ops",), "cannot add token 'ops': .* already has an entry of that name. Choose another name, or replace"),
        (("a b",), "'a b': expected 1 to 64 letters, digits, '.', '_' and '-', starting with a letter or digit"),
        (("",), "'': expected 1 to 64 letters"),
        (("x", "--scope", "everything"), "'everything': expected read, read:DATASET, stats, announce or admin"),
        (("x", "--days", "0"), "0.0 is not in the range"),
        (("x", "--days", "1e300"), "1e[+]300 is not in the range"),
        (("x", "--out", "no-such-folder/token"), "cannot write .*no-such-folder.*: No such file or directory"),
    ],
)
def test_what_cannot_be_added_changes_nothing(file: Path, arguments: tuple[str, ...], sentence: str) -> None:
    """The error has the value and the rule; the exit code is 2 for invalid arguments, and 1 for other failures."""
    file.write_text(WRITTEN_BY_HAND)
    refused = token("add", file, *arguments)
    assert (refused.code, refused.out) == (1 if "--out" in arguments else 2, "")
    assert re.search(sentence, refused.err), refused.err
    assert file.read_text() == WRITTEN_BY_HAND
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("command", ["add", "revoke", "rotate", "list"])
def test_an_invalid_file_is_not_edited(file: Path, command: str) -> None:
    """A server would reject the file, too; the error has the reason."""
    for text in ("[ops\n", "[ops]\nscopes = []\n"):
        file.write_text(text)
        refused = token(command, file, *(() if command == "list" else ("ops",)))
        assert (refused.code, "invalid" in refused.err, "Traceback" in refused.err) == (2, True, False), refused
        assert file.read_text() == text


def test_edits_keep_comments_and_other_entries(file: Path) -> None:
    """An edit changes the lines of its own entry only; a comment above the next entry belongs to that one."""
    file.write_text(WRITTEN_BY_HAND)
    assert token("add", file, "x.y").code == 0
    added = file.read_text()
    assert added.startswith(WRITTEN_BY_HAND + '\n["x.y"]\nsha256 = ')
    assert token("rotate", file, "a.b").code == 0
    old, new = added.splitlines(), file.read_text().splitlines()
    assert [line for line in old if line not in new] == [
        f'sha256 = "{tomllib.loads(WRITTEN_BY_HAND)["a.b"]["sha256"]}"'
    ]
    assert token("revoke", file, "x.y").code == token("revoke", file, "a.b").code == 0
    left = WRITTEN_BY_HAND.splitlines()
    assert [line for line in file.read_text().splitlines() if line] == [left[0], *left[8:]]
    assert token("revoke", file, "ops").code == 0
    assert content(file) == {}
    assert "# Operators only." in file.read_text()


def test_list_shows_names_scopes_and_expiry(file: Path) -> None:
    """Neither tokens nor digests are shown, and an expired entry is marked."""
    file.write_text(WRITTEN_BY_HAND + '[old]\ntoken = "tl_bbbbbbbbbbbbbbbbbbbb"\nscopes = ["read"]\n'
                    "expires = 2020-01-01T00:00:00Z\n")  # fmt: skip
    listed = token("list", file)
    assert listed.out.splitlines() == [
        "NAME  SCOPES             EXPIRES",
        "a.b   read:train, stats  never",
        "ops   admin              never",
        "old   read               2020-01-01T00:00:00Z (expired)",
    ]
    missing = token("list", file.with_name("missing.toml"))
    assert (missing.code, "no such file" in missing.err) == (2, True)


@pytest.mark.parametrize("command", ["revoke", "rotate"])
def test_a_name_that_is_not_there_is_refused_with_those_that_are(file: Path, command: str) -> None:
    """Nothing is written, and a missing file is not created."""
    refused = token(command, file, "trainer")
    assert (refused.code, "unknown token 'trainer': " in refused.err, file.exists()) == (2, True, False)
    file.write_text(WRITTEN_BY_HAND)
    refused = token(command, file, "trainer")
    assert (refused.code, "tokens.toml contains a.b, ops" in refused.err) == (2, True)
    assert file.read_text() == WRITTEN_BY_HAND


def test_rotate_replaces_the_token_and_keeps_the_rest(file: Path, tmp_path: Path) -> None:
    """A token in the file itself becomes a digest; a client's token file is replaced as well."""
    file.write_text(WRITTEN_BY_HAND)
    out = tmp_path / "token"
    out.write_text("tl_aaaaaaaaaaaaaaaaaaaa\n")
    assert token("rotate", file, "ops", "--out", str(out)).code == 0
    entry = content(file)["ops"]
    assert (entry["scopes"], entry["memory_share"], set(entry)) == (
        ["admin"], 0.5, {"sha256", "scopes", "memory_share"},
    )  # fmt: skip
    assert re.fullmatch(r"tl_[\w-]{43}\n", out.read_text())
    assert file.stat().st_mode & 0o777 == out.stat().st_mode & 0o777 == 0o600
    refused = token("rotate", file, "ops", "--out", str(file))
    assert (refused.code, "the file is the token file. Choose another" in refused.err) == (2, True)


def test_an_expired_token_is_rotated_with_a_new_expiry_only(file: Path) -> None:
    """Its new token would have expired at once."""
    file.write_text('[old]\ntoken = "tl_bbbbbbbbbbbbbbbbbbbb"\nscopes = ["read"]\nexpires = 2020-01-01T00:00:00Z\n')
    refused = token("rotate", file, "old")
    assert (refused.code, "it has expired. Specify a new expiry with --days" in refused.err) == (2, True)
    assert token("rotate", file, "old", "--days", "1").code == 0
    assert content(file)["old"]["expires"].year > 2020


def test_a_link_stays_a_link(file: Path, tmp_path: Path) -> None:
    """The target of the link is replaced, in its own folder."""
    (tmp_path / "real").mkdir()
    file.symlink_to(tmp_path / "real" / "tokens.toml")
    assert token("add", file, "trainer").code == 0
    assert file.is_symlink()
    assert (tmp_path / "real" / "tokens.toml").stat().st_mode & 0o777 == 0o600


def test_commands_at_the_same_time_lose_no_entry(file: Path) -> None:
    """Each command waits until the previous one has replaced the file."""
    names = [f"t{number}" for number in range(6)]
    command = [sys.executable, "-c", SERVER, "token", "add", "--file", str(file)]
    running = [subprocess.Popen([*command, name], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for name in names]
    for process in running:
        assert process.communicate()[1]
        assert process.returncode == 0
    assert sorted(content(file)) == names


def test_a_failure_leaves_both_files_as_they_were(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table and the token's file are both written before either is replaced: a full disk changes neither."""
    file.write_text(WRITTEN_BY_HAND)
    out = tmp_path / "token"
    out.write_text("as it was")
    synced: list[int] = []

    def full_disk(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(click.ClickException, match="No space left on device") as failed:
        token_commands.token(["rotate", "ops", "--file", str(file), "--out", str(out)], standalone_mode=False)
    assert failed.value.exit_code == 1
    assert (file.read_text(), out.read_text()) == (WRITTEN_BY_HAND, "as it was")
    assert sorted(tmp_path.iterdir()) == [out, file]


def test_a_running_server_applies_add_rotate_and_revoke(file: Path, start_server: StartServer) -> None:
    """After the last token is revoked, the server rejects all clients, also within an epoch."""
    first = token("add", file, "trainer").out.strip()
    server = start_server(MANY, "--num-workers", "1", "--tokens", str(file))
    assert len(RemoteDataset(server.url, token=first)) == 100_000
    second = token("rotate", file, "trainer").out.strip()
    server.await_line(r"reloaded .*: 1 token \(trainer\)")
    with pytest.raises(Unauthorized):
        RemoteDataset(server.url, token=first)
    batches = iter(DataLoader(RemoteDataset(server.url, token=second), 10, output="numpy"))
    next(batches)
    assert token("revoke", file, "trainer").code == 0
    server.await_line("is empty or missing: clients cannot authenticate")
    with pytest.raises(Unauthorized):
        list(batches)
    with pytest.raises(Unauthorized):
        RemoteDataset(server.url)
