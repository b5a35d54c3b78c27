"""The recipes of our images, and how they get into the cluster."""

import io
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from e2e.cluster.binaries import ensure_prometheus
from e2e.cluster.containerd import Containerd
from e2e.cluster.errors import ClusterError
from e2e.cluster.external import Current, Kind
from e2e.cluster.host import require_linux
from e2e.cluster.images.deps import DEPS, deps_layer, file_key, find_model, forget_older
from e2e.cluster.images.layers import LayerWriter, add_python, add_system
from e2e.cluster.images.oci import ImageConfig, Layer, cached_layer, layer_of_bytes, manifest_digest, write_archive
from e2e.cluster.locks import one_at_a_time
from e2e.cluster.node import Node
from e2e.cluster.progress import Progress
from e2e.cluster.settings import REPOSITORY, Settings

APP = "opt/guidevane/app"
PYTHON_ENV = {"PYTHONPATH": f"/{APP}:/{DEPS}", "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/tmp"}
BASE_RECIPE = "2"


def version() -> str:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return str(project["version"])


class ImageBuilder:
    """Makes the layers of each image; what changes seldom is kept in the cache under its key."""

    def __init__(self, settings: Settings, progress: Progress) -> None:
        self.settings = settings
        self.progress = progress

    def operator(self) -> tuple[list[Layer], ImageConfig]:
        deps = deps_layer("operator", self.settings, self.progress)
        refuse_torch(deps)
        code = self.code("crds/guidevane_api", "operator/guidevane_operator")
        return [self.base(), deps, code], python_config("guidevane_operator")

    def runtime(self) -> tuple[list[Layer], ImageConfig]:
        deps = deps_layer("runtime", self.settings, self.progress)
        code = self.code("crds/guidevane_api", "runtime/guidevane_runtime", "kernels/guidevane_kernels")
        return [self.base(), deps, self.model(), code], python_config("guidevane_runtime")

    def prometheus(self) -> tuple[list[Layer], ImageConfig]:
        program = ensure_prometheus(self.settings, self.progress)
        layer = self.cached("prometheus", file_key(program), lambda layer: layer.file("bin/prometheus", program))
        return [layer], ImageConfig(entrypoint=("/bin/prometheus",), user="10001:10001")

    def cached(self, name: str, key: str, fill: Callable[[LayerWriter], None]) -> Layer:
        path = self.settings.layers / f"{name}-{key}.tar"
        if not path.exists():
            self.progress.say(f"writing layer {path.name} ...")
        layer = cached_layer(path, lambda tar: fill(LayerWriter(tar)))
        forget_older(path, f"{name}-*")
        return layer

    def base(self) -> Layer:
        prefix, name = Path(sys.base_prefix), f"python{sys.version_info[0]}.{sys.version_info[1]}"

        def fill(layer: LayerWriter) -> None:
            add_system(layer)
            add_python(layer, prefix, name)

        return self.cached("base", f"{file_key(prefix / 'bin' / name)}-{BASE_RECIPE}", fill)

    def model(self) -> Layer:
        model = find_model(self.settings, self.progress)
        return self.cached("model", file_key(model), lambda layer: layer.file(f"models/smollm2/{model.name}", model))

    def code(self, *packages: str) -> Layer:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            layer = LayerWriter(tar)
            for package in packages:
                source = REPOSITORY / package
                layer.tree(f"{APP}/{source.name}", source, is_code)
            # So that importlib.metadata knows the version of what runs.
            metadata = f"Metadata-Version: 2.1\nName: guidevane\nVersion: {version()}\n"
            layer.data(f"{APP}/guidevane-{version()}.dist-info/METADATA", metadata.encode())
        return layer_of_bytes(buffer.getvalue())


def is_code(path: PurePosixPath) -> bool:
    return path.name != "__pycache__" and not path.name.startswith(".")


def python_config(module: str) -> ImageConfig:
    return ImageConfig(("/usr/local/bin/python3", "-m", module), user="10001:10001", env=PYTHON_ENV, workdir="/tmp")


def refuse_torch(layer: Layer) -> None:
    """The operator never computes; torch in its image would be a gigabyte of mistake."""
    with layer.open() as content, tarfile.open(fileobj=content) as tar:
        if found := [m.name for m in tar if m.name.startswith((f"{DEPS}/torch/", f"{DEPS}/triton/"))]:
            raise ClusterError(
                f"the operator image contains {found[0]} and {len(found) - 1} more files of torch;"
                " remove what needs torch from the operator extra in pyproject.toml"
            )


def build_images(names: list[str], settings: Settings, cluster: Node | Kind | Current, progress: Progress) -> None:
    """Build and hand over each image, unless the cluster has exactly it already."""
    require_linux()
    builder = ImageBuilder(settings, progress)
    recipes = {"operator": builder.operator, "runtime": builder.runtime, "prometheus": builder.prometheus}
    if unknown := set(names) - set(recipes):
        raise ClusterError(f"no image is named {', '.join(sorted(unknown))}; there are: {', '.join(recipes)}")
    if settings.kind == "current":
        wanted = ", ".join(f"guidevane.dev/{name}:{version()}" for name in names or recipes)
        progress.say(f"the current cluster is yours: its nodes need {wanted}")
        return
    store = cluster.image_store() if isinstance(cluster, Node) else None
    with one_at_a_time(settings.layers, progress):
        for name in names or recipes:
            reference = f"guidevane.dev/{name}:{version()}"
            layers, config = recipes[name]()
            if store is None:
                hand_over_file(cluster, reference, layers, config, progress)
            else:
                hand_over(store, reference, layers, config, progress)


def hand_over(store: Containerd, reference: str, layers: list[Layer], config: ImageConfig, progress: Progress) -> None:
    """Stream into containerd what it does not have: after a change of our code that is a few hundred kilobytes."""
    if store.images().get(reference) == manifest_digest(layers, config):
        progress.say(f"{reference} is in the cluster")
        return
    held = store.blobs()
    size = sum(layer.size for layer in layers if layer.digest not in held)
    with progress.step(f"{reference} imported, {size / 2**20:.1f} MiB of it new"):
        store.import_stream(lambda out: write_archive(out, reference, layers, config, held))
        store.forget_untagged()


def hand_over_file(
    cluster: Node | Kind | Current, reference: str, layers: list[Layer], config: ImageConfig, progress: Progress
) -> None:
    with tempfile.NamedTemporaryFile(suffix=".tar") as file, progress.step(f"{reference} loaded"):
        write_archive(file, reference, layers, config)
        file.flush()
        cluster.load_image(Path(file.name))
