"""What goes into a layer: trees and files of this machine, owned by root, with fixed times, in a fixed order."""

import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath

from e2e.cluster.errors import ClusterError
from e2e.cluster.host import run
from e2e.cluster.images.oci import member

Keep = Callable[[PurePosixPath], bool]

# Names that libraries open at run time, or that linkers left behind as empty stubs and torch still wants.
RUNTIME_LIBRARIES = (
    *("libc.so.6", "libdl.so.2", "libm.so.6", "libpthread.so.0", "libresolv.so.2", "librt.so.1", "libutil.so.1"),
    *("libnss_dns.so.2", "libnss_files.so.2", "libgcc_s.so.1", "libstdc++.so.6", "libgomp.so.1"),
)
APPLETS = (
    "cat",
    "env",
    "grep",
    "head",
    "id",
    "ip",
    "kill",
    "ls",
    "mount",
    "ps",
    "sh",
    "sleep",
    "tail",
    "touch",
    "wget",
)
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
ACCOUNTS = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/sh\n"
    "app:x:10001:10001::/home/app:/bin/sh\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\napp:x:10001:\n",
    "etc/nsswitch.conf": "hosts: files dns\npasswd: files\ngroup: files\n",
}


class LayerWriter:
    """Adds members to a layer, each path once, with the folders above it."""

    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar
        self._paths: set[str] = set()

    def _claim(self, path: str) -> bool:
        """True if nothing is at this path yet; the folders above are there afterwards."""
        if path in self._paths:
            return False
        for parent in reversed(PurePosixPath(path).parents):
            if str(parent) != ".":
                self.folder(str(parent))
        self._paths.add(path)
        return True

    def folder(self, path: str, mode: int = 0o755) -> None:
        if path not in self._paths and self._claim(path):
            self._tar.addfile(member(path, mode, tarfile.DIRTYPE))

    def data(self, path: str, content: bytes, mode: int = 0o644) -> None:
        if self._claim(path):
            info = member(path, mode)
            info.size = len(content)
            self._tar.addfile(info, io.BytesIO(content))

    def file(self, path: str, source: Path) -> None:
        """The content of `source`, links followed."""
        if self._claim(path):
            with source.open("rb") as content:
                stat = os.fstat(content.fileno())
                info = member(path, 0o755 if stat.st_mode & 0o111 else 0o644)
                info.size = stat.st_size
                self._tar.addfile(info, content)

    def symlink(self, path: str, target: str) -> None:
        if self._claim(path):
            info = member(path, 0o777, tarfile.SYMTYPE)
            info.linkname = target
            self._tar.addfile(info)

    def tree(self, path: str, source: Path, keep: Keep) -> None:
        """What `keep` says yes to, asked with the path relative to `source`; a folder refused is not entered."""
        for entry in sorted(os.scandir(source), key=lambda e: e.name):
            self._entry(path, entry, PurePosixPath(), keep)

    def _entry(self, path: str, entry: "os.DirEntry[str]", above: PurePosixPath, keep: Keep) -> None:
        relative = above / entry.name
        if not keep(relative):
            return
        if entry.is_symlink():
            self.symlink(f"{path}/{relative}", os.readlink(entry.path))
        elif entry.is_dir():
            for inner in sorted(os.scandir(entry.path), key=lambda e: e.name):
                self._entry(path, inner, relative, keep)
        else:
            self.file(f"{path}/{relative}", Path(entry.path))


def linked_libraries(files: Iterable[Path]) -> dict[str, Path]:
    """Absolute path -> file for each shared library that the loader would load for these files."""
    paths = [str(file) for file in files]
    output = subprocess.run(["ldd", *paths], capture_output=True, text=True, check=False).stdout
    words = [word for line in output.splitlines() for word in line.split() if word.startswith("/")]
    return {word: Path(word) for word in words if not word.endswith(":") and Path(word).is_file()}


def loader_cache() -> dict[str, Path]:
    """Name -> file of the libraries that the loader finds by itself."""
    found: dict[str, Path] = {}
    for line in run([shutil.which("ldconfig") or "/sbin/ldconfig", "-p"]).splitlines():
        name, arrow, path = line.partition(" => ")
        if arrow:
            found.setdefault(name.split()[0], Path(path))
    return found


def add_libraries(layer: LayerWriter, files: Iterable[Path]) -> None:
    for path, source in sorted(linked_libraries(files).items()):
        layer.file(path.lstrip("/"), source)


def add_system(layer: LayerWriter) -> None:
    """What every image has below the interpreter: libc and friends, a shell, certificates, the account of uid 10001."""
    known = loader_cache()
    for name in RUNTIME_LIBRARIES:
        if name in known:
            layer.file(str(known[name]).lstrip("/"), known[name])
    if not CERTIFICATES.is_file():
        raise ClusterError(f"there is no {CERTIFICATES}; install ca-certificates and try again")
    layer.file(str(CERTIFICATES).lstrip("/"), CERTIFICATES)
    layer.symlink("usr/lib/ssl/cert.pem", str(CERTIFICATES))
    layer.file("bin/busybox", Path("/bin/busybox"))
    for applet in APPLETS:
        layer.symlink(f"bin/{applet}", "busybox")
    for path, text in ACCOUNTS.items():
        layer.data(path, text.encode())
    for folder in ("dev", "home/app", "proc", "sys"):
        layer.folder(folder)
    layer.folder("tmp", 0o1777)


def add_python(layer: LayerWriter, prefix: Path, version: str) -> None:
    """The interpreter that runs this, under its own prefix, without what only development needs."""
    layer.tree(str(prefix).lstrip("/"), prefix, lambda path: is_needed_of_python(path, version))
    extensions = (prefix / "lib" / version / "lib-dynload").glob("*.so")
    add_libraries(layer, [prefix / "bin" / version, *extensions])
    layer.symlink("usr/local/bin", str(prefix / "bin"))


def is_needed_of_python(path: PurePosixPath, version: str) -> bool:
    """The prefix may be /usr, shared with all the rest of the machine: only what is Python's is taken."""
    dropped = {"__pycache__", "test", "tests", "idle_test", "idlelib", "turtledemo", "ensurepip", "dist-packages"}
    if path.name in dropped or path.suffix == ".a" or path.name.startswith("config-"):
        return False
    match path.parts:
        case ("bin" | "lib",):
            return True
        case ("bin", name):
            return name.startswith("python")
        case ("lib", name, *rest):
            return name.startswith("libpython") or (name == version and rest[:1] != ["site-packages"])
    return False
