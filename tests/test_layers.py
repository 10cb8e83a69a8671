"""The layout of the house: a module imports only from rooms named before its own."""

import ast
import sys
from collections.abc import Collection, Iterator
from importlib import import_module
from pathlib import Path

import pytest

import gncprior

PACKAGE = Path(gncprior.__file__).parent

# Rooms in the order of the theory. A package is one room. New rooms are added where they belong.
ROOMS = """
    errors buffers adjoint recipes
    schedules mixtures native splines expansions filters arrays images symmetries deep_png exif
    picture_files metrics
    prior tiles checkpoints passes sensitivities
    fidelity
    solvers unrolled
    tangents score_matching calibration balance noise_reading convexity tails deepening
    optimizers natural_gradient datasets gauges runs workers training
    unrolled_adjoint unrolled_learning retiming finetuning
    doubts restore evaluation
    plots inspection interop experiments web
    cli __main__
""".split()  # noqa: SIM905  (one line per floor reads better)

# Rooms that know nothing of each other although one is named first: the inverse problems and the
# solvers take anything with a gradient or a prox.
OF_THE_PRIOR = {"prior", "splines", "filters", "native"}
STRANGERS = {"fidelity": OF_THE_PRIOR, "solvers": OF_THE_PRIOR, "unrolled": OF_THE_PRIOR}

# Imported where they are used, never when a module is loaded.
OPTIONAL = {"matplotlib", "pooch", "scipy", "tensorboard", "tifffile"}

# All that the command may import when it is loaded, beside the standard library.
LIGHT = {"cyclopts", "rich", "gncprior.cli", "gncprior.errors", "gncprior.recipes"}

FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = [file for file in FILES if file != PACKAGE / "__init__.py"]


def name_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def within(name: str, packages: Collection[str]) -> bool:
    """Whether the full name is one of the packages or lies in one."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def imports(tree: ast.AST) -> Iterator[str]:
    """Full names of all that is imported anywhere in the tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_on_load(tree: ast.Module) -> Iterator[str]:
    """The same without what stands inside functions or is meant for type checkers."""
    pending: list[ast.AST] = [tree]
    while pending:
        match pending.pop():
            case ast.Import() | ast.ImportFrom() as node:
                yield from imports(node)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                pass
            case ast.If(test=ast.Name("TYPE_CHECKING"), orelse=otherwise):
                pending.extend(otherwise)
            case node:
                pending.extend(ast.iter_child_nodes(node))


def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text("utf-8"))


@pytest.mark.parametrize("file", MODULES, ids=name_of)
def test_imports_only_from_rooms_named_before(file):
    room = name_of(file).partition(".")[0]
    assert room in ROOMS, f"name the new room {room!r} where it belongs"
    allowed = set(ROOMS[: ROOMS.index(room) + 1]) - STRANGERS.get(room, set())
    used = {name.split(".")[1] for name in imports(parse(file)) if name.startswith("gncprior.")}
    assert used - {"__version__"} <= allowed


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_no_star_imports_and_no_relative_ones(file):
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            assert node.names[0].name != "*"


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_optional_packages_are_imported_where_they_are_used(file):
    loaded = {name.partition(".")[0] for name in imports_on_load(parse(file))}
    assert loaded.isdisjoint(OPTIONAL)


@pytest.mark.parametrize(
    "file", [f for f in FILES if within(f"gncprior.{name_of(f)}", LIGHT)], ids=name_of
)
def test_the_command_loads_nothing_heavy(file):
    for name in imports_on_load(parse(file)):
        assert within(name, LIGHT | sys.stdlib_module_names), name


def test_the_rules_see_what_they_should():
    tree = ast.parse(
        "import a.b\n"
        "def f():\n    from c import d\n"
        "if True:\n    from e import g, h\n"
        "if TYPE_CHECKING:\n    import i\n"
    )
    assert set(imports(tree)) == {"a.b", "c.d", "e.g", "e.h", "i"}
    assert set(imports_on_load(tree)) == {"a.b", "e.g", "e.h"}


def test_public_names_exist_and_agree_with_those_for_type_checkers():
    for name, module in gncprior._PUBLIC.items():
        home = import_module(f"gncprior.{module}")
        assert getattr(gncprior, name) is getattr(home, name)
    typed = {name.removeprefix("gncprior.") for name in imports(parse(PACKAGE / "__init__.py"))}
    table = {f"{module}.{name}" for name, module in gncprior._PUBLIC.items()}
    assert {name for name in typed if name.partition(".")[0] in ROOMS} == table
    assert set(gncprior.__all__) == set(gncprior._PUBLIC) <= set(dir(gncprior))


def test_unknown_public_name():
    with pytest.raises(AttributeError, match="'gncprior' has no attribute 'nonsense'"):
        gncprior.nonsense  # noqa: B018
