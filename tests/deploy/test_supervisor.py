"""Run folders are private and swept once their owner is dead; no descendant outlives `end_descendants`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tournant.cluster.run_folder import RunFolder
from tournant.deploy.supervisor import check_port
from tournant.workers.errors import ConfigError


def test_a_run_folder_is_private_and_goes_with_its_owner(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (folder.path / "deep").mkdir()
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.remove()
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_only_folders_of_the_dead_are_swept(tmp_path: Path) -> None:
    living = RunFolder(tmp_path)
    prefix = f"tournant-{os.getuid()}-"
    code = (
        "import os, signal, sys; from pathlib import Path; from tournant.cluster.run_folder import RunFolder\n"
        "folder = RunFolder(Path(sys.argv[1])); (folder.path / 'log').write_text('x'); print(folder.path, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
    dead = Path(killed.stdout.strip())
    assert (dead / "log").is_file()
    old_staging, new_staging = tmp_path / f"{prefix}00000000.new", tmp_path / f"{prefix}00000001.new"
    others = [tmp_path / f"{prefix}notes", tmp_path / "tournant-data"]
    for path in (old_staging, new_staging, *others):
        path.mkdir()
    os.utime(old_staging, (0, 0))
    link = tmp_path / f"{prefix}00000002"
    link.symlink_to(others[0])

    third = RunFolder(tmp_path)
    assert not dead.exists()
    assert not old_staging.exists()
    assert all(path.exists() for path in (living.path, third.path, new_staging, link, *others))
    living.remove()
    third.remove()


def test_a_named_folder_is_gone_on_with_once_its_owner_has_ended(tmp_path: Path) -> None:
    first = RunFolder(tmp_path, "00c0ffee")
    (first.path / "kept").write_text("x")
    with pytest.raises(BlockingIOError):
        RunFolder(tmp_path, "00c0ffee")
    os.close(first._lock)  # as the kernel does when the process has ended
    second = RunFolder(tmp_path, "00c0ffee")
    assert second.path == first.path
    assert (second.path / "kept").exists()
    other = RunFolder(tmp_path)
    assert second.path.exists()
    other.remove()
    second.remove()
    assert list(tmp_path.iterdir()) == []


def test_every_descendant_ends_also_one_that_left_its_parent_and_session() -> None:
    code = """
import os, subprocess, sys
from tournant.deploy.supervisor import become_subreaper, descendants, end_descendants
become_subreaper()
orphan = "import os, signal, time\\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\\nos.write(1, b'x')\\ntime.sleep(600)"
middle = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {orphan!r}], start_new_session=True)"
child = subprocess.Popen([sys.executable, "-c", middle], stdout=subprocess.PIPE)
child.stdout.read(1)
os.waitpid(child.pid, 0)
before = len(descendants(os.getpid()))
print(before, end_descendants(), descendants(os.getpid()))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "1 [] []"


def test_a_port_is_free_or_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on port {port} of 127.0.0.1"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)
    with pytest.raises(ConfigError, match="choose another"):
        check_port("256.0.0.1", port)
