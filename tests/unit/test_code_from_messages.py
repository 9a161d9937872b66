"""No message decides which code runs, but by the name of a type that the group declared."""

import ast
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest

from tests.unit.test_intake import delivery, wire, work_of
from towpath.app import App
from towpath.errors import DecodeError
from towpath.messages import decode, event

SOURCES = Path(__file__).parents[2] / "src" / "towpath"
UNSAFE_MODULES = {"cloudpickle", "dill", "marshal", "pickle", "shelve", "yaml"}
UNSAFE_CALLS = {"__import__", "eval", "exec", "import_module", "spec_from_file_location"}
MAY_IMPORT = {
    "__init__.py",  # its own public names
    "consumer/service.py",  # the app that the command line names
    "testing/services/embedded_kafka.py",  # one package, by its own name
}


@event("x1.parcel", destination="parcels")
@dataclass(frozen=True)
class Parcel:
    weight: int


def _unsafe(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names} & UNSAFE_MODULES
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").split(".")[0]} & UNSAFE_MODULES
        elif isinstance(node, ast.Call):
            called = node.func
            name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
            found |= {name} & UNSAFE_CALLS
    return found


def test_nothing_is_unpickled_evaluated_or_imported_by_name() -> None:
    """X1: but the app that the command line names."""
    found = {
        path.relative_to(SOURCES).as_posix(): unsafe
        for path in SOURCES.rglob("*.py")
        if (unsafe := _unsafe(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert found == {path: {"import_module"} for path in MAY_IMPORT}


def test_a_type_that_names_a_module_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """X1: it is no type of the group's."""
    module = f"hostile_{uuid4().hex}"
    (tmp_path / f"{module}.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    app = App("group")

    work = work_of(app, delivery(wire(type=f"{module}.run")))

    assert work.type not in app.handlers
    assert module not in sys.modules


class _Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return sys.exit, ("unpickled",)


@pytest.mark.parametrize("content_type", ["application/json", "application/x-python-pickle"])
def test_a_pickle_is_not_read(content_type: str) -> None:
    """X1: whatever it calls itself."""
    with pytest.raises(DecodeError):
        decode(Parcel, pickle.dumps(_Bomb()), content_type)
