"""The layout of the repository: imports go downwards only, host modules need no jax."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# From the bottom up; a module may import from its own layer and from those before it.
LAYERS = [
    ["pallas_kernels"],
    [
        "k3jax.errors",
        "k3jax.config",
        "k3jax.paths",
        "k3jax.flags",
        "k3jax.benchmarking",
        "k3jax.distributed",
    ],
    ["k3jax.cache", "k3jax.models", "k3jax.checkpoint"],
    ["k3jax.engine", "k3jax.generation", "k3jax.chat"],
    ["k3jax.serve", "k3jax.rl", "k3jax.train"],
    ["k3jax", "scripts", "tests"],  # k3jax/__init__.py is the public surface
]
# What pallas_kernels may import beside the standard library, so that it is usable alone.
KERNELS_ONLY = {"jax", "numpy", "jaxtyping", "pallas_kernels"}
# Of k3jax, where that is less than the layers allow.
SPEAKS_TO = {
    "serve": {"serve", "engine", "generation", "chat", "config", "errors", "flags"},
    "rl": {"rl", "engine", "config", "errors"},
}
# Schedulers, caches, configuration and text run on the host and start without jax.
HOST_ONLY = [
    "k3jax/__init__.py",
    "k3jax/config.py",
    "k3jax/errors.py",
    "k3jax/flags.py",
    "k3jax/paths.py",
    "k3jax/cache",
    "k3jax/chat",
    "k3jax/engine/async_engine.py",
    "k3jax/engine/config.py",
    "k3jax/engine/inputs.py",
    "k3jax/engine/output.py",
    "k3jax/engine/request.py",
    "k3jax/engine/scheduler.py",
]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def python_files(*places: str) -> list[Path]:
    found = []
    for place in places:
        path = ROOT / place
        found += sorted(path.rglob("*.py")) if path.is_dir() else [path] * path.exists()
    return found


def imports_of(path: Path) -> list[str]:
    """Absolute names imported anywhere in a file, those only for the type checker left out."""
    names = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            names.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: relative import"
            # `from package import module` imports package.module.
            names.extend(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(), str(path)))
    return names


def layer_of(name: str) -> int | None:
    """Index of the layer that a dotted name belongs to, by its longest prefix."""
    for length in range(len(name.split(".")), 0, -1):
        prefix = ".".join(name.split(".")[:length])
        for level, members in enumerate(LAYERS):
            if prefix in members:
                return level
    return None


@pytest.mark.parametrize("package", ["pallas_kernels", "k3jax", "scripts"])
def test_imports_go_downwards(package):
    wrong = []
    for path in python_files(package):
        own = module_name(path)
        level = layer_of(own)
        for name in imports_of(path):
            if (used := layer_of(name)) is not None and used > level:
                wrong.append(f"{own} imports {name}")
    assert not wrong


def test_kernels_are_usable_alone():
    wrong = [
        f"{module_name(path)} imports {name}"
        for path in python_files("pallas_kernels")
        for name in imports_of(path)
        if (top := name.split(".")[0]) not in sys.stdlib_module_names and top not in KERNELS_ONLY
    ]
    assert not wrong


@pytest.mark.parametrize("package", SPEAKS_TO)
def test_speaks_only_to(package):
    wrong = [
        f"{module_name(path)} imports {name}"
        for path in python_files(f"k3jax/{package}")
        for name in imports_of(path)
        if name.startswith("k3jax.") and name.split(".")[1] not in SPEAKS_TO[package]
    ]
    assert not wrong


def test_every_package_has_a_layer():
    packages = {f"k3jax.{path.stem}" for path in (ROOT / "k3jax").iterdir() if path.name[0] != "_"}
    packages.discard("k3jax.assets")  # data
    assert packages <= {name for layer in LAYERS for name in layer}


def test_host_modules_import_no_jax():
    names = [module_name(path) for path in python_files(*HOST_ONLY)]
    script = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    assert 'jax' not in sys.modules, name + ' imports jax'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *names], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_no_machine_paths():
    """A path that exists on one machine only is a mistake in any file that others get."""
    pattern = re.compile(rb"(?<![\w.$}-])/(?:" + b"|".join([b"wo" + b"rk", b"ro" + b"ot"]) + b")/")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    files = [ROOT / name.decode() for name in listed.stdout.split(b"\0") if name]
    wrong = [
        f"{path.relative_to(ROOT)}: {match.group().decode()}"
        for path in files
        if path.is_file() and path.suffix not in {".npz", ".npy", ".safetensors", ".png"}
        for match in [pattern.search(path.read_bytes())]
        if match
    ]
    assert not wrong
