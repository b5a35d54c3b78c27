"""The image store of the node, spoken to by `ctr` over its socket, from inside of the node or from outside."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import IO

from e2e.cluster.errors import CommandError
from e2e.cluster.host import run


class Containerd:
    def __init__(self, socket: Path) -> None:
        # kubelet sees this namespace only.
        self._ctr = ["ctr", "--address", str(socket), "--namespace", "k8s.io"]

    def is_serving(self) -> bool:
        return subprocess.run([*self._ctr, "version"], capture_output=True, check=False).returncode == 0

    def images(self) -> dict[str, str]:
        """Reference -> digest of the manifest."""
        lines = run([*self._ctr, "images", "ls"]).splitlines()[1:]
        return {fields[0]: fields[2] for fields in map(str.split, lines)}

    def forget_untagged(self) -> None:
        """Let go of images that lost their tag to a newer build, which would keep gigabytes of old layers on the disk.

        kubelet would collect them only when the disk is full. A running container keeps its own files. When this
        returns their layers are gone: the next import must not count on one that is about to be collected.
        """
        images = self.images()
        tagged = {digest for name, digest in images.items() if not name.startswith("sha256:")}
        if old := [name for name, digest in images.items() if digest not in tagged]:
            run([*self._ctr, "images", "rm", "--sync", *old])

    def blobs(self) -> set[str]:
        """Digests of the content that need not be sent again."""
        return set(run([*self._ctr, "content", "ls", "-q"]).split())

    def import_stream(self, write: Callable[[IO[bytes]], None]) -> None:
        """Import what `write` writes; nothing is put on the disk in between."""
        command = [*self._ctr, "images", "import", "-"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            broken = False
            try:
                write(process.stdin)
                process.stdin.close()
            except BrokenPipeError:
                broken = True  # ctr ended early: its own words are the better error
            output = process.stdout.read().decode(errors="replace")
        if process.returncode or broken:
            raise CommandError(command, process.returncode, output)

    def import_file(self, archive: Path) -> str:
        return run([*self._ctr, "images", "import", str(archive)])
