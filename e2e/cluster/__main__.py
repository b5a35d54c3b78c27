"""``python -m e2e.cluster``: bring a cluster for the end-to-end tests up, use it, take it down."""

import argparse
import os
import sys
from pathlib import Path

from e2e.cluster.binaries import ensure_binaries, ensure_prometheus
from e2e.cluster.errors import ClusterError
from e2e.cluster.external import Current, Kind
from e2e.cluster.images.build import build_images
from e2e.cluster.node import Node
from e2e.cluster.progress import Progress
from e2e.cluster.settings import KINDS, Settings, read_settings

KIND_CLASSES: dict[str, type[Node] | type[Kind] | type[Current]] = {"node": Node, "kind": Kind, "current": Current}

EPILOG = """
environment:
  CLUSTER                 same as --cluster
  GUIDEVANE_CLUSTER_DIR   same as --state
  GUIDEVANE_NODE_CGROUP   same as --cgroup
  GUIDEVANE_CACHE_DIR     binaries and image layers (default ~/.cache/guidevane)
  TORCH_INDEX_URL         a package index with other builds of torch, for the runtime image

examples:
  python -m e2e.cluster up
  python -m e2e.cluster images
  python -m e2e.cluster kubectl get pods -A
  python -m e2e.cluster exec -- curl -s http://10.96.0.1
  python -m e2e.cluster down
"""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m e2e.cluster",
        description="A real single-node Kubernetes for the end-to-end tests, without Docker or a registry.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--cluster", choices=KINDS, help="node: our own, Linux and root (default); kind; current kubeconfig"
    )
    parser.add_argument("--state", metavar="DIR", help="folder of this cluster (default ~/.cache/guidevane/cluster)")
    parser.add_argument("--cgroup", metavar="NAME", help="the node's cgroup (default guidevane-node); one per cluster")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("binaries", help="build Kubernetes, etcd and Prometheus if they are missing; needs no root")
    commands.add_parser("up", help="bring the cluster up and wait until it is ready; does nothing if it is")
    commands.add_parser("down", help="take it down from any state; images stay in the state folder")
    commands.add_parser("status", help="show what runs; status 1 if no cluster is up")
    commands.add_parser("exec", usage="%(prog)s -- COMMAND ...", help="run a command inside of the node, with kubectl")
    commands.add_parser("kubectl", usage="%(prog)s ...", help="short for: exec -- kubectl ...")
    load = commands.add_parser("load-image", help="import image archives (OCI or docker save) into the cluster")
    load.add_argument("archives", nargs="+", type=Path, metavar="ARCHIVE")
    images = commands.add_parser("images", help="build our images from this machine's files and import them")
    images.add_argument("names", nargs="*", metavar="NAME", help="operator, runtime, prometheus; all by default")
    return parser


def split_words(argv: list[str]) -> tuple[list[str], list[str]]:
    """Our own arguments, and the words of another command after `exec` or `kubectl`, which argparse must not read."""
    position = 0
    while position < len(argv) and argv[position].startswith("-"):
        has_value = argv[position] in ("--cluster", "--state", "--cgroup")
        position += 2 if has_value else 1
    if argv[position : position + 1] not in (["exec"], ["kubectl"]) or argv[position + 1 :] in (["-h"], ["--help"]):
        return argv, []
    return argv[: position + 1], argv[position + 1 :]


def run_command(arguments: argparse.Namespace, words: list[str], settings: Settings) -> int:
    progress = Progress()
    cluster = KIND_CLASSES[settings.kind](settings, progress)
    match arguments.command:
        case "binaries":
            ensure_binaries(settings, progress)
            ensure_prometheus(settings, progress)
        case "up":
            cluster.up()
        case "down":
            cluster.down()
        case "status":
            return cluster.status()
        case "exec" | "kubectl":
            cluster.exec(command_of(arguments.command, words))
        case "load-image":
            for archive in arguments.archives:
                load_image(cluster, progress, archive)
        case "images":
            build_images(arguments.names, settings, cluster, progress)
    return 0


def command_of(name: str, words: list[str]) -> list[str]:
    if name == "kubectl":
        return ["kubectl", *words]
    command = words[1:] if words[:1] == ["--"] else words
    if not command:
        raise ClusterError("exec needs a command: python -m e2e.cluster exec -- COMMAND ...")
    return command


def load_image(cluster: Node | Kind | Current, progress: Progress, archive: Path) -> None:
    if not archive.is_file():
        raise ClusterError(f"there is no archive {archive}; give the path of a tar that `docker save` or buildah wrote")
    with progress.step(f"loaded {archive}"):
        cluster.load_image(archive.resolve())


def main() -> int:
    ours, words = split_words(sys.argv[1:])
    arguments = make_parser().parse_args(ours)
    try:
        settings = read_settings(os.environ, arguments.cluster, arguments.state, arguments.cgroup)
        return run_command(arguments, words, settings)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, `head` for one, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
