"""The file of the spill: bounded, locked, private, and whole after any end of its process."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from quire.shared.process.errors import StartError
from quire.worker.engine.features.spill.block_file import BlockFile, DamagedBlock, block_key

FINGERPRINT = bytes(range(32))
BLOCK = 10_000
MAX_BYTES = 200_000

WRITER = """
import sys
from itertools import count
from pathlib import Path
from tests.worker.engine.features.spill.test_block_file import contents, key, make
file = make(Path(sys.argv[1]))
for number in count(int(sys.argv[2])):
    file.write(key(number), [memoryview(contents(number))])
    print(number, flush=True)
"""


def make(folder: Path, fingerprint: bytes = FINGERPRINT, block: int = BLOCK, max_bytes: int = MAX_BYTES) -> BlockFile:
    return BlockFile.open(folder, fingerprint, block, max_bytes)


def key(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest()


def contents(number: int) -> bytes:
    return number.to_bytes(8, "little") * (BLOCK // 8)


def read(file: BlockFile, number: int) -> bytes | None:
    """Return a block of the file, in the two parts of which it was made; None if the file does not have it."""
    parts = bytearray(3000), bytearray(BLOCK - 3000)
    is_there = file.read(key(number), [memoryview(part) for part in parts])
    return bytes(parts[0] + parts[1]) if is_there else None


def write(file: BlockFile, number: int) -> None:
    file.write(key(number), [memoryview(contents(number)[:7]), memoryview(contents(number)[7:])])


def test_blocks_are_read_as_they_were_written_also_by_another_process(tmp_path: Path) -> None:
    file = make(tmp_path)
    for number in range(5):
        write(file, number)
        write(file, number)
    assert len(file) == 5
    file.close()
    file = make(tmp_path)
    assert [read(file, number) for number in range(5)] == [contents(number) for number in range(5)]
    assert read(file, 5) is None


def test_the_file_never_exceeds_its_bound_and_the_block_used_last_stays(tmp_path: Path) -> None:
    file = make(tmp_path)
    places = file.num_places
    for number in range(3 * places):
        write(file, number)
        assert len(file) <= places
        file.touch(key(0))
        status = os.stat(file.path)
        assert status.st_size <= MAX_BYTES
        assert status.st_blocks * 512 <= MAX_BYTES + 4096
    assert places >= MAX_BYTES // (BLOCK + 4096) - 1
    assert read(file, 0) == contents(0)
    assert [number for number in range(3 * places) if key(number) in file] == [0, *range(2 * places + 1, 3 * places)]


def test_after_a_restart_the_oldest_block_is_overwritten_first(tmp_path: Path) -> None:
    file = make(tmp_path)
    places = file.num_places
    for number in range(places + 3):
        write(file, number)
    file.close()
    file = make(tmp_path)
    write(file, 100)
    assert key(3) not in file
    assert key(4) in file


def test_two_workers_have_a_file_each_and_find_them_again(tmp_path: Path) -> None:
    first, second = make(tmp_path), make(tmp_path)
    assert first.path != second.path
    write(second, 1)
    first.close()
    second.close()
    assert len(list(tmp_path.iterdir())) == 2
    # A worker of another model takes none of these while it can have one of its own: the files belong to one model.
    files = [make(tmp_path), make(tmp_path)]
    assert sorted(len(file) for file in files) == [0, 1]


def test_workers_that_start_at_once_take_the_files_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in [make(tmp_path), make(tmp_path)]:
        file.close()
    pread, reads, other = os.pread, 0, bytes(32)

    def read(file: int, count: int, at: int) -> bytes:
        nonlocal reads
        reads += 1
        if reads == 2:  # both files are locked: the second worker starts, and has to wait for the first one
            wait([pool.submit(make, tmp_path, other)], timeout=0.5)
        return pread(file, count, at)

    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(os, "pread", read)
        make(tmp_path, other)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_file_of_another_size_or_fingerprint_is_emptied_and_its_blocks_are_counted(tmp_path: Path) -> None:
    file = make(tmp_path)
    for number in range(4):
        write(file, number)
    file.close()
    for others in ({"fingerprint": bytes(32)}, {"block": BLOCK // 2}, {"max_bytes": MAX_BYTES // 2}, {}):
        file = make(tmp_path, **others)  # type: ignore[arg-type]
        assert len(file) == 0
        assert file.num_foreign == 4
        for number in range(4):
            file.write(key(number), [memoryview(bytes(others.get("block", BLOCK)))])  # type: ignore[call-overload]
        file.close()


def test_a_file_of_another_model_stays_as_long_as_this_model_has_one(tmp_path: Path) -> None:
    theirs = make(tmp_path, bytes(32))
    write(theirs, 1)
    mine = make(tmp_path)
    write(mine, 2)
    theirs.close()
    mine.close()
    mine = make(tmp_path)
    assert read(mine, 2) == contents(2)
    assert read(make(tmp_path, bytes(32)), 1) == contents(1)


def test_a_damaged_block_is_never_returned_and_its_place_is_free_again(tmp_path: Path) -> None:
    file = make(tmp_path)
    write(file, 1)
    content = file.path.read_bytes()
    at = content.index(contents(1))
    with file.path.open("r+b") as raw:
        raw.seek(at + 777)
        raw.write(b"\xff")
    with pytest.raises(DamagedBlock, match="is not what was written"):
        read(file, 1)
    assert read(file, 1) is None
    write(file, 1)
    assert read(file, 1) == contents(1)


def test_a_block_in_the_place_of_another_is_damaged(tmp_path: Path) -> None:
    """Two whole blocks that are exchanged, as by a disk that writes to a wrong sector."""
    file = make(tmp_path)
    write(file, 1)
    write(file, 2)
    content = bytearray(file.path.read_bytes())
    one, two = content.index(contents(1)), content.index(contents(2))
    content[one : one + BLOCK], content[two : two + BLOCK] = contents(2), contents(1)
    file.path.write_bytes(content)
    for number in (1, 2):
        with pytest.raises(DamagedBlock):
            read(file, number)


def test_the_key_of_a_block_covers_the_fingerprint() -> None:
    assert block_key(FINGERPRINT, b"hash") != block_key(bytes(32), b"hash")
    assert block_key(FINGERPRINT, b"hash") != block_key(FINGERPRINT, b"other")


def test_the_file_is_private(tmp_path: Path) -> None:
    file = make(tmp_path / "new")
    assert file.path.stat().st_mode & 0o777 == 0o600
    assert file.path.parent.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_used_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"--kv-spill-dir .*: No such file or directory; make the folder above it"):
        make(tmp_path / "no" / "such")
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match=r"--kv-spill-dir .*file: File exists; give a folder"):
        make(tmp_path / "file")
    with pytest.raises(StartError, match=r"--kv-spill-gb .* is too small for one block of .* MiB: raise it"):
        make(tmp_path, max_bytes=BLOCK)
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "blocks-0.kv").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StartError, match="Too many levels of symbolic links; give a folder"):
        make(tmp_path / "link")


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path).close()
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(StartError, match=r"blocks-0\.kv: another user's file, .*; remove it, or give another"):
        make(tmp_path)
    monkeypatch.undo()
    assert make(tmp_path).path.name == "blocks-0.kv", "it is not locked"


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "blocks-0.kv", 0o600)
    with pytest.raises(StartError, match=r"blocks-0\.kv: .*no regular file; remove it"):
        make(tmp_path)


@pytest.mark.parametrize("error", [28, 13, 30])
def test_a_full_or_read_only_disk_is_refused_with_a_remedy(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    remedy = "lower --kv-spill-gb" if error == 28 else "give a folder"
    with pytest.raises(StartError, match=f"{os.strerror(error)}; {remedy}"):
        make(tmp_path)


def test_a_process_that_is_killed_while_it_writes_leaves_only_whole_blocks(tmp_path: Path) -> None:
    known: set[int] = set()
    for round_ in range(6):
        first = round_ * 1_000_000
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(first)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        for number in range(first, first + 1 + 40 * round_):
            assert process.stdout.readline() == b"%d\n" % number
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        file = make(tmp_path)
        assert file.num_damaged == file.num_foreign == 0
        found = [number for number in range(first, first + 100_000) if key(number) in file]
        assert len(found) > min(40 * round_, file.num_places - 2)
        for number in found:
            assert read(file, number) == contents(number)
        assert not known.intersection(found)
        known.update(found)
        assert len(file) >= min(len(found), file.num_places - 1)
        file.close()
