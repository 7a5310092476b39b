"""A file system that behaves as FAT32 does under Linux, for kernels without vfat: over FUSE, spoken raw.

No symbolic and no hard links, no owners, every mode 0755, files of at most 4 GiB - 1, names that do not care for case
and lack some characters, no holes, times in steps of 2 s, no more room than there is, and it can be pulled out: then
everything fails with EIO. What is written lies in a folder, so that it can be put back. Needs root and /dev/fuse.
Formats: include/uapi/linux/fuse.h, protocol 7.31.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import select
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

MAX_FILE_BYTES = (4 << 30) - 1
CLUSTER_BYTES = 32 * 1024
ZEROS = bytes(1 << 20)
HEAD, REPLY = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ")
MNT_DETACH = 2


def why_no_fat() -> str:
    """Empty where it can be had, else the reason for a skip."""
    if sys.platform != "linux" or os.geteuid():
        return "mounting needs root on Linux"
    return "" if os.path.exists("/dev/fuse") else "there is no /dev/fuse here"


def check_name(name: str) -> None:
    if any(c in '"*/:<>?\\|' or c < " " for c in name) or name != name.rstrip(". ") or len(name) > 255:
        raise OSError(errno.EINVAL, "no name for FAT")


class Fat:
    """The file system's answers. Paths are relative to the folder where everything lies."""

    def __init__(self, folder: str, capacity: int) -> None:
        self.folder, self.capacity, self.calls_left = folder, capacity, -1  # -1: not to be pulled out
        self.paths, self.nodes, self.numbers = {1: ""}, {"": 1}, itertools.count(2)
        self.answers: dict[int, Callable[[int, bytes], bytes | None]] = {
            1: self.lookup, 3: self.getattr, 4: self.setattr, 8: self.mknod, 9: self.mkdir, 10: self.unlink,
            11: self.rmdir, 12: self.rename, 14: self.open, 15: self.read, 16: self.write, 17: self.statfs,
            18: self.release, 20: self.fsync, 25: self.nothing, 26: self.init, 27: self.opendir, 28: self.readdir,
            29: self.nothing, 30: self.nothing, 34: self.nothing, 35: self.create, 45: self.rename2,
        }  # fmt: skip

    def answer(self, opcode: int, node: int, data: bytes) -> tuple[int, bytes]:
        """(error, data) for one request."""
        if opcode in (6, 13):  # SYMLINK, LINK
            return errno.EPERM, b""
        if opcode not in self.answers:
            return errno.ENOSYS, b""
        if not self.calls_left:
            return errno.EIO, b""
        self.calls_left -= self.calls_left > 0
        try:
            return 0, self.answers[opcode](node, data) or b""
        except OSError as error:
            return error.errno or errno.EIO, b""

    def real(self, node: int) -> str:
        """Where it lies."""
        if node not in self.paths:
            raise OSError(errno.ENOENT, "unlinked")
        return os.path.join(self.folder, self.paths[node])

    def child(self, parent: int, raw: bytes) -> str:
        """The path of a name in a folder: as it is written there, else as it was asked for."""
        name, where = raw.rstrip(b"\0").decode(), self.real(parent)
        check_name(name)
        same = [other for other in os.listdir(where) if other.lower() == name.lower()]
        return os.path.join(self.paths[parent], same[0] if same else name)

    def used(self) -> int:
        files = (os.path.join(at, name) for at, _, names in os.walk(self.folder) for name in names)
        return sum(-(-os.path.getsize(path) // CLUSTER_BYTES) * CLUSTER_BYTES for path in files)

    def grow(self, file: int, size: int) -> None:
        """Room for a file of this size, which FAT fills with zeros."""
        now = os.fstat(file).st_size
        if size > MAX_FILE_BYTES:
            raise OSError(errno.EFBIG, "4 GiB")
        if size > now:
            more = -(-size // CLUSTER_BYTES) - -(-now // CLUSTER_BYTES)
            if more and self.used() + more * CLUSTER_BYTES > self.capacity:
                raise OSError(errno.ENOSPC, "full")
            os.ftruncate(file, size)

    def attributes(self, node: int) -> bytes:
        found = os.lstat(self.real(node))
        size, times = found.st_size, [int(t) // 2 * 2 for t in (found.st_atime, found.st_mtime, found.st_mtime)]
        blocks = -(-size // CLUSTER_BYTES) * CLUSTER_BYTES // 512
        mode = (stat.S_IFDIR if stat.S_ISDIR(found.st_mode) else stat.S_IFREG) | 0o755
        return struct.pack("<6Q10I", node, size, blocks, *times, 0, 0, 0, mode, 1, 0, 0, 0, CLUSTER_BYTES, 0)

    def entry(self, path: str) -> bytes:
        if not os.path.lexists(os.path.join(self.folder, path)):
            raise OSError(errno.ENOENT, path)
        node = self.nodes.get(path) or next(self.numbers)
        self.nodes[path] = node
        self.paths[node] = path
        return struct.pack("<4Q2I", node, 0, 0, 0, 0, 0) + self.attributes(node)

    def init(self, _: int, data: bytes) -> bytes:
        _, _, readahead, flags = struct.unpack_from("<4I", data)
        flags &= 1 << 0 | 1 << 5 | 1 << 22  # ASYNC_READ, BIG_WRITES, MAX_PAGES
        return struct.pack("<4IHHIIHHI28x", 7, 31, readahead, flags, 12, 9, len(ZEROS), 1, 256, 0, 0)

    def nothing(self, _node: int, _data: bytes) -> None:
        return None

    def lookup(self, node: int, data: bytes) -> bytes:
        return self.entry(self.child(node, data))

    def getattr(self, node: int, _: bytes) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + self.attributes(node)

    def setattr(self, node: int, data: bytes) -> bytes:
        valid, _, _, size, _, _, mtime, _, _, _, _, _, _, uid, gid, _ = struct.unpack_from("<II6Q8I", data)
        if valid & 6 and (uid * (valid & 2) or gid * (valid & 4)):
            raise OSError(errno.EPERM, "no owners")
        if valid & 8:
            with open(self.real(node), "r+b") as file:
                self.grow(file.fileno(), size)
                file.truncate(size)
        if valid & 32 and not valid & 256:
            os.utime(self.real(node), (mtime, mtime))
        return self.getattr(node, b"")

    def mknod(self, node: int, data: bytes) -> bytes:
        if not stat.S_ISREG(struct.unpack_from("<I", data)[0]):
            raise OSError(errno.EPERM, "no such files")
        path = self.child(node, data[16:])
        os.close(os.open(os.path.join(self.folder, path), os.O_CREAT | os.O_EXCL | os.O_RDWR))
        return self.entry(path)

    def mkdir(self, node: int, data: bytes) -> bytes:
        path = self.child(node, data[8:])
        os.mkdir(os.path.join(self.folder, path))
        return self.entry(path)

    def unlink(self, node: int, data: bytes) -> None:
        self.gone(self.child(node, data), os.unlink)

    def rmdir(self, node: int, data: bytes) -> None:
        self.gone(self.child(node, data), os.rmdir)

    def gone(self, path: str, how: Callable[[str], None]) -> None:
        how(os.path.join(self.folder, path))
        self.paths.pop(self.nodes.pop(path, 0), None)

    def rename(self, node: int, data: bytes, skip: int = 8) -> None:
        (to,), names = struct.unpack_from("<Q", data), data[skip:].split(b"\0")
        old, new = self.child(node, names[0]), self.child(to, names[1])
        if old.lower() == new.lower():
            new = os.path.join(self.paths[to], names[1].decode())
        os.rename(os.path.join(self.folder, old), os.path.join(self.folder, new))
        for path in [path for path in self.nodes if path == old or path.startswith(f"{old}/")]:
            moved = new + path.removeprefix(old)
            self.nodes[moved] = self.nodes.pop(path)
            self.paths[self.nodes[moved]] = moved

    def rename2(self, node: int, data: bytes) -> None:
        flags, names = struct.unpack_from("<8xI", data)[0], data[16:].split(b"\0")
        to = struct.unpack_from("<Q", data)[0]
        if flags & 1 and os.path.lexists(os.path.join(self.folder, self.child(to, names[1]))):
            raise OSError(errno.EEXIST, "there")
        self.rename(node, data, skip=16)

    def open(self, node: int, data: bytes) -> bytes:
        flags = struct.unpack_from("<I", data)[0] & os.O_ACCMODE
        return struct.pack("<QIi", os.open(self.real(node), os.O_RDWR if flags else os.O_RDONLY), 1, 0)  # DIRECT_IO

    def create(self, node: int, data: bytes) -> bytes:
        path = self.child(node, data[16:])
        file = os.open(os.path.join(self.folder, path), os.O_CREAT | os.O_RDWR)
        return self.entry(path) + struct.pack("<QIi", file, 1, 0)

    def opendir(self, _node: int, _data: bytes) -> bytes:
        return struct.pack("<QIi", 0, 0, 0)

    def readdir(self, node: int, data: bytes) -> bytes:
        _, start, room = struct.unpack_from("<QQI", data)
        found, names = b"", sorted(os.listdir(self.real(node)))
        for number, name in enumerate(names[start:], start + 1):
            raw = name.encode()
            item = struct.pack("<QQII", number + 1, number, len(raw), 0) + raw
            item += bytes(-len(item) % 8)
            if len(found) + len(item) > room:
                break
            found += item
        return found

    def read(self, _: int, data: bytes) -> bytes:
        file, start, size = struct.unpack_from("<QQI", data)
        return os.pread(file, size, start)

    def write(self, _: int, data: bytes) -> bytes:
        file, start, size = struct.unpack_from("<QQI", data)
        before, content = os.fstat(file).st_size, data[40 : 40 + size]
        self.grow(file, start + size)
        if start < before or content != ZEROS[:size]:  # the folder's own disk is spared the zeros
            os.pwrite(file, content, start)
        return struct.pack("<II", size, 0)

    def fsync(self, _node: int, _data: bytes) -> None:
        return None

    def release(self, _: int, data: bytes) -> None:
        os.close(struct.unpack_from("<Q", data)[0])

    def statfs(self, _node: int, _data: bytes) -> bytes:
        blocks, free = (n // CLUSTER_BYTES for n in (self.capacity, max(0, self.capacity - self.used())))
        return struct.pack("<5Q4I24x", blocks, free, free, 0, 0, CLUSTER_BYTES, 255, CLUSTER_BYTES, 0)


def serve(folder: str, at: str, capacity: int) -> None:
    """Mount it, say so, and answer until the input ends; a number there is how many calls it has until it is gone."""
    device, libc = os.open("/dev/fuse", os.O_RDWR), ctypes.CDLL(None, use_errno=True)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other,max_read={len(ZEROS)}"
    if libc.mount(b"fat", os.fsencode(at), b"fuse", 0, options.encode()):
        raise OSError(ctypes.get_errno(), "mount")
    fat = Fat(folder, capacity)
    print("mounted", flush=True)
    try:
        while True:
            ready, _, _ = select.select([device, sys.stdin], [], [])
            if sys.stdin in ready:
                line = sys.stdin.readline()
                if not line:
                    return
                fat.calls_left = int(line)
                print("told", flush=True)
            if device in ready:
                request = os.read(device, len(ZEROS) + 4096)
                _, opcode, unique, node, *_ = HEAD.unpack_from(request)
                if opcode in (2, 42):  # FORGET, BATCH_FORGET: no answer
                    continue
                error, data = fat.answer(opcode, node, request[HEAD.size :])
                with contextlib.suppress(FileNotFoundError):  # the asker was killed
                    os.write(device, REPLY.pack(REPLY.size + len(data), -error, unique) + data)
    finally:
        libc.umount2(os.fsencode(at), MNT_DETACH)


class Stick:
    """Such a file system, mounted at `at` while it is plugged in."""

    def __init__(self, folder: Path, at: Path, capacity: int) -> None:
        self.at, self._command = at, [sys.executable, __file__, str(folder), str(at), str(capacity)]
        for path in (folder, at):
            path.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def plugged(self, calls: int = -1) -> Iterator[Callable[[int], None]]:
        """With `calls`, it is pulled out after so many; gives what says so later."""
        pipe = subprocess.PIPE
        with subprocess.Popen(self._command, stdin=pipe, stdout=pipe, text=True) as process:
            assert process.stdin and process.stdout
            told, answers = process.stdin, process.stdout
            assert answers.readline() == "mounted\n"

            def pull_out(after: int) -> None:
                told.write(f"{after}\n")
                told.flush()
                assert answers.readline() == "told\n"

            pull_out(calls)
            try:
                yield pull_out
            finally:
                told.close()
                process.wait(20)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], int(sys.argv[3]))
