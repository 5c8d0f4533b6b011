"""The file with the key of a user: how it comes to be, and all that makes it no secret."""

from __future__ import annotations

import os
import pwd
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from mgpu_check.engine.remote.credentials import UnusableKey, default_path, secret_in

NOBODY = 65534


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent-key"


def test_it_is_made_for_this_user_only_and_stays_the_same(path: Path):
    old = os.umask(0)
    try:
        first = secret_in(path, make_directory=False)
    finally:
        os.umask(old)
    found = path.stat()
    assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_nlink) == (0o600, os.geteuid(), 1)
    assert secret_in(path, make_directory=False) == first and len(first) == 32
    assert os.listdir(path.parent) == [path.name]  # no draft is left
    path.unlink()
    assert secret_in(path, make_directory=False) != first


def test_a_file_that_the_user_has_made_is_taken(path: Path):
    path.write_text("0123456789abcdef" * 4 + "\n")
    path.chmod(0o400)
    first = secret_in(path, make_directory=False)
    path.chmod(0o600)
    path.write_text("0123456789abcdef" * 4)  # as an editor, or a mount, may leave it
    assert secret_in(path, make_directory=False) == first


def test_of_many_that_come_at_once_one_makes_it(path: Path):
    code = (
        "import sys; from pathlib import Path; from mgpu_check.engine.remote.credentials import secret_in;"
        "sys.stdin.read(); print(secret_in(Path(sys.argv[1]), make_directory=True).hex())"
    )
    path = path.parent / "new" / "agent-key"
    # They all read from one pipe, whose end starts them.
    read, write = os.pipe()
    command = [sys.executable, "-c", code, str(path)]
    processes = [subprocess.Popen(command, stdin=read, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    os.close(read)
    os.close(write)
    said = {process.communicate()[0] for process in processes}
    assert len(said) == 1 and len(said.pop().strip()) == 64
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert os.listdir(path.parent) == [path.name]


def replaced_by_a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def replaced_by_a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def replaced_by_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir(mode=0o700)


AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.parent.chmod(0o777), "others can write to .* chmod go-w"),
        (lambda path: path.parent.chmod(0o770), "others can write to"),
        (lambda path: path.parent.parent.chmod(0o777), "others can write to"),
        (lambda path: path.chmod(0o604), "open to others .mode 604.*remove it"),
        (lambda path: path.chmod(0o640), "open to others .mode 640"),
        (replaced_by_a_link, "is a symbolic link; name the file"),
        (replaced_by_a_fifo, "is not a regular file"),
        (replaced_by_a_directory, "is not a regular file"),
        (lambda path: path.write_text(""), "holds no key"),
        (lambda path: path.write_text("0123456789abcdef"), "holds no key"),
        (lambda path: path.write_bytes(bytes(64)), "holds no key"),
        (lambda path: path.write_bytes(b" " + os.urandom(1 << 20)), "holds no key"),  # stripped, it is as long
        pytest.param(lambda path: os.chown(path, NOBODY, NOBODY), f"belongs to user {NOBODY}", marks=AS_ROOT),
        pytest.param(lambda path: os.chown(path.parent, NOBODY, NOBODY), f"belongs to user {NOBODY}", marks=AS_ROOT),
    ],
)
def test_what_others_may_know_or_replace_is_refused(spoil, words: str, tmp_path: Path):
    path = tmp_path / "above" / "own" / "agent-key"
    secret_in(path, make_directory=True)
    spoil(path)
    with pytest.raises(UnusableKey, match=words):
        secret_in(path, make_directory=False)


def test_a_sticky_directory_is_safe(path: Path):
    """As /tmp is: others can add files there, and replace none."""
    path.parent.chmod(0o1777)
    assert secret_in(path, make_directory=False) == secret_in(path, make_directory=False)


def test_the_way_to_it_may_lead_over_links(path: Path):
    (path.parent / "real").mkdir(mode=0o700)
    (path.parent / "link").symlink_to("real")
    assert secret_in(path.parent / "link" / "key", False) == secret_in(path.parent / "real" / "key", False)


def test_a_directory_that_was_named_and_is_not_there_is_told(path: Path):
    with pytest.raises(UnusableKey, match=r"No such file or directory.*--agent-key-file=FILE.*--trust-network"):
        secret_in(path.parent / "misspelled" / "key", make_directory=False)


@pytest.mark.parametrize("kind", ["modes", pytest.param("root", marks=AS_ROOT)])
def test_a_share_that_keeps_no_secrets_is_refused(kind: str, path: Path, monkeypatch: pytest.MonkeyPatch):
    """A file system without modes; and NFS with `root_squash`, which gives files of root to the user nobody."""
    fchmod = os.fchmod

    def spoil(fd: int, mode: int) -> None:
        if kind == "root":
            os.fchown(fd, NOBODY, NOBODY)
        fchmod(fd, mode if kind == "root" else 0o755)

    monkeypatch.setattr(os, "fchmod", spoil)
    with pytest.raises(UnusableKey, match="this file system does not keep it private"):
        secret_in(path, make_directory=False)
    assert os.listdir(path.parent) == []


def test_the_default_is_in_the_home_of_whoever_runs_this(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    home = str(tmp_path)
    assert default_path({"HOME": home}) == tmp_path / ".config" / "mgpu-check" / "agent-key"
    assert default_path({"HOME": home, "XDG_CONFIG_HOME": "/x"}) == Path("/x/mgpu-check/agent-key")
    assert default_path({"HOME": home, "XDG_CONFIG_HOME": "relative"}) == default_path({"HOME": home})

    class Entry:
        pw_dir = "/of/the/password/file"

    monkeypatch.setattr(pwd, "getpwuid", lambda user: Entry)
    own = Path("/of/the/password/file/.config/mgpu-check/agent-key")
    assert default_path({}) == default_path({"HOME": "relative"}) == own
    monkeypatch.setattr(
        os, "geteuid", lambda: os.stat(home).st_uid + 1
    )  # as after sudo, with the home of who called it
    assert default_path({"HOME": home}) == own
