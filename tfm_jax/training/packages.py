"""Fetching of pinned packages with the ordinary clients (pip, npm, apt), into a cache folder."""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


class FetchError(RuntimeError):
    """A package could not be fetched; the message names it and the client's reason."""


@dataclass(frozen=True)
class Package:
    """One pinned package.

    `client` is "pip" (wheel), "sdist" (pip, source archive), "npm" or "apt". `sha256` pins the
    archive; apt packages move with the distribution's point releases and carry none: the version
    that was really read goes to the manifest. `needs` are further apt packages unpacked beside.
    """

    name: str
    version: str
    client: str
    licence: str
    sha256: str | None = None
    needs: tuple[str, ...] = ()


def default_cache() -> Path:
    """The per-user folder where fetched archives are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tfm_jax" / "packages"


def fetch(package: Package, cache: Path) -> Path:
    """The folder in `cache` that holds the package's archive (apt: its unpacked files).

    A package already there is not fetched again. Raises FetchError.
    """
    folder = cache / f"{package.client}-{_slug(package.name)}-{_slug(package.version)}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix="fetch-", dir=cache))
    try:
        {"pip": _pip, "sdist": _pip, "npm": _npm, "apt": _apt}[package.client](package, temporary)
        _check_digest(package, temporary)
        # mkdtemp makes a private folder; the cache may be shared.
        temporary.chmod(0o755)
        try:
            temporary.rename(folder)
        except OSError:
            # Another process finished the same package first.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def found_version(package: Package, folder: Path) -> str:
    """The version that was fetched: the pin, or for apt what the distribution offered."""
    marker = folder / "VERSION"
    return marker.read_text().strip() if marker.is_file() else package.version


def members(folder: Path, pattern: str) -> Iterator[tuple[str, bytes]]:
    """`(name, bytes)` of the files whose path matches `pattern`, sorted by path.

    Reads the wheel or tar archive in `folder`, or the folder's own files when there is none.
    Gzip files (`.gz`, `.dz`) come decompressed.
    """
    wanted = re.compile(pattern)
    wheels = sorted(folder.glob("*.whl"))
    tars = sorted([*folder.glob("*.tar.gz"), *folder.glob("*.tgz")])
    if wheels:
        with zipfile.ZipFile(wheels[0]) as archive:
            for name in sorted(n for n in archive.namelist() if wanted.search(n)):
                yield name, _decompress(name, archive.read(name))
    elif tars:
        # Tar archives read forward only at speed, so the few hundred files are held and sorted.
        found = {}
        with tarfile.open(tars[0]) as archive:
            for entry in archive:
                if entry.isfile() and wanted.search(entry.name):
                    stream = archive.extractfile(entry)
                    assert stream is not None  # isfile() above
                    found[entry.name] = stream.read()
        for name in sorted(found):
            yield name, _decompress(name, found[name])
    else:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            # Documentation packages hold each page several times, as links.
            if path.is_file() and not _through_link(path, folder) and wanted.search(name):
                yield name, _decompress(name, path.read_bytes())


def run(command: list[str], cwd: Path | None = None, **options) -> str:
    """Standard output of `command`; FetchError with the end of its error output on failure."""
    try:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, check=False, **options
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FetchError(f"{command[0]}: {error}") from error
    if done.returncode:
        reason = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]
        raise FetchError(f"{' '.join(command[:6])} failed: {' / '.join(reason)}")
    return done.stdout


def _pip(package: Package, folder: Path) -> None:
    kind = "--only-binary" if package.client == "pip" else "--no-binary"
    requirement = f"{package.name}=={package.version}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    run([*pip, kind, ":all:", "--dest", str(folder), requirement])


def _npm(package: Package, folder: Path) -> None:
    run(["npm", "pack", "--silent", f"{package.name}@{package.version}"], cwd=folder)


def _apt(package: Package, folder: Path) -> None:
    for name in (package.name, *package.needs):
        run(["apt-get", "download", "--quiet", name], cwd=folder)
    for archive in sorted(folder.glob("*.deb")):
        run(["dpkg-deb", "-x", str(archive), str(folder)])
        if archive.name.startswith(f"{package.name}_"):
            (folder / "VERSION").write_text(run(["dpkg-deb", "-f", str(archive), "Version"]))
        archive.unlink()


def _check_digest(package: Package, folder: Path) -> None:
    if package.sha256 is None:
        return
    archives = sorted(path for path in folder.iterdir() if path.is_file())
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in archives]
    if digests != [package.sha256]:
        raise FetchError(
            f"{package.name} {package.version}: expected one archive of sha256 {package.sha256},"
            f" got {digests}"
        )


def _through_link(path: Path, root: Path) -> bool:
    return path.resolve() != root.resolve() / path.relative_to(root)


def _decompress(name: str, data: bytes) -> bytes:
    return gzip.decompress(data) if name.endswith((".gz", ".dz")) else data


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-")
