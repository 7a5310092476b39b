"""Launcher + PyInstaller folder -> one executable; launcher.c says how it is laid out.

    pack.py LAUNCHER FOLDER OUTPUT

Needs the programs `zstd` and `objdump`. The same input gives the same bytes.
"""

import hashlib
import os
import re
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

MAGIC = b"SHARDBX1"
LEVEL = "-22"


def files(folder: Path) -> Iterator[tuple[str, int, bytes]]:
    """Path, mode and content of every file, and of every symbolic link (its target), sorted by path."""
    found = [Path(root, name) for root, folders, names in os.walk(folder) for name in [*folders, *names]]
    for path in sorted(found, key=lambda path: path.relative_to(folder).parts):
        name, mode = path.relative_to(folder).as_posix(), path.lstat().st_mode
        if stat.S_ISLNK(mode):
            yield name, 0o120777, os.readlink(path).encode()
        elif stat.S_ISREG(mode):
            yield name, 0o100755 if mode & 0o100 else 0o100644, path.read_bytes()


def glibc_needed(folder: Path) -> str:
    """The highest glibc symbol version that any program or library in the folder asks for."""
    versions = [(2, 0)]
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.open("rb").read(4) == b"\x7fELF":
            listing = subprocess.run(["objdump", "-T", path], capture_output=True, text=True, check=True).stdout
            needed = re.findall(r"\*UND\*.*\bGLIBC_(\d+)\.(\d+)", listing)
            versions += [(int(major), int(minor)) for major, minor in needed]
    return ".".join(map(str, max(versions)))


def packed(launcher: bytes, folder: Path) -> bytes:
    """The whole executable."""
    found = list(files(folder))
    lines = [f"{mode:o} {len(data)} {hashlib.sha256(data).hexdigest()} {name}\n" for name, mode, data in found]
    manifest, content = "".join(lines).encode(), b"".join(data for _, _, data in found)
    zstd = ["zstd", "-q", "-c", "--ultra", LEVEL, "--check", "--single-thread"]
    payload = subprocess.run(zstd, input=content, capture_output=True, check=True).stdout
    at = len(launcher)
    numbers = struct.pack("<5Q", at, len(payload), len(content), at + len(payload), len(manifest))
    version = hashlib.sha256(manifest).hexdigest()[:32].encode()
    whole = launcher + payload + manifest + numbers + version + glibc_needed(folder).encode().ljust(8, b"\0") + MAGIC
    return whole + hashlib.sha256(whole).digest()


def main(argv: Sequence[str]) -> None:
    """Write OUTPUT and say how big it is."""
    launcher, folder, output = map(Path, argv)
    data = packed(launcher.read_bytes(), folder)
    output.parent.mkdir(parents=True, exist_ok=True)
    fresh = output.with_name(f"{output.name}.new")  # the old one may be running
    fresh.write_bytes(data)
    fresh.chmod(0o755)
    fresh.replace(output)
    (output.parent / "SHA256SUMS").write_text(f"{hashlib.sha256(data).hexdigest()}  {output.name}\n")
    print(f"{output}: {len(data) / 1e6:.1f} MB, needs glibc {glibc_needed(folder)} or newer")


if __name__ == "__main__":
    main(sys.argv[1:])
