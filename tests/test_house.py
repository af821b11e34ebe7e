"""The direction of imports: a room of the package imports rooms below it, never above and never around in a circle."""

import ast
import pathlib
import sys

import slipstream

PACKAGE = pathlib.Path(slipstream.__file__).parent
# From top to bottom. Rooms that stand in one tuple do not know each other.
ROOMS = (
    ("cli",),
    ("commands",),
    ("async_llm",),
    ("llm", "bench"),
    ("sampling_params", "outputs"),
    ("verify",),
    ("serve",),
    ("components",),
    ("graph",),
    ("rank", "embed"),
    ("process",),
    ("device",),
    ("models",),
    ("ops",),
    ("grammar",),
    ("tokenize",),
    ("weights",),
    ("transport", "client"),
    ("schedule",),
    ("log",),
    ("config", "shard"),
    ("system",),
    ("errors",),
)
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
# names of the package itself, and the rooms they come from
PUBLIC = {"LLM": "llm", "AsyncLLM": "async_llm", "SamplingParams": "sampling_params"}


def imports(file: pathlib.Path) -> set[str]:
    """The rooms that a file imports, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "slipstream":
            names = [f"slipstream.{PUBLIC.get(alias.name, alias.name)}" for alias in node.names if alias.name != "__version__"]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file} has a relative import"
            names = [node.module or ""]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("slipstream.")}
    return found


def room_of(file: pathlib.Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_every_file_of_the_package_stands_in_a_room():
    rooms = {room_of(file) for file in PACKAGE.rglob("*.py")} - {"__init__"}
    assert rooms == LEVEL.keys()


def test_imports_point_down_the_house():
    wrong: list[str] = []
    for file in sorted(PACKAGE.rglob("*.py")):
        room = room_of(file)
        if room != "__init__":
            wrong += [f"{file.relative_to(PACKAGE)} imports {other}" for other in sorted(imports(file))
                      if other != room and LEVEL[other] <= LEVEL[room]]  # fmt: skip
    assert not wrong, wrong


def test_the_log_and_the_planner_need_only_msgspec_and_numpy():
    allowed = {"slipstream", "msgspec", "numpy"}
    for room in ("log", "schedule"):
        for file in (PACKAGE / room).glob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                outside = {name.split(".")[0] for name in names} - allowed - sys.stdlib_module_names
                assert not outside, f"{file.relative_to(PACKAGE)} imports {outside}"
