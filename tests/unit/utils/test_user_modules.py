"""Files of the user's that have names of ours."""

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from appo.utils.errors import PACKAGE, UsageError
from appo.utils.user_modules import FORMER, import_user_module

Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes files into the working directory; what was imported from there is forgotten at the end."""
    monkeypatch.chdir(tmp_path)
    path, finders, modules = list(sys.path), list(sys.meta_path), set(sys.modules)
    sys.path[:] = [place for place in path if Path(place).resolve() != PACKAGE.parent.parent]  # where pytest puts it
    for name in [name for name in sys.modules if name.partition(".")[0] in FORMER]:
        monkeypatch.delitem(sys.modules, name)

    def write_file(name: str, text: str) -> None:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))

    yield write_file
    sys.path[:], sys.meta_path[:] = path, finders
    for name in set(sys.modules) - modules:
        places = [getattr(sys.modules[name], "__file__", None), *getattr(sys.modules[name], "__path__", ())]
        if any(place and Path(place).is_relative_to(tmp_path) for place in places):
            del sys.modules[name]


def test_modules_of_the_user_have_names_of_former_packages_of_ours(write: Write) -> None:
    write("utils/more.py", "THREE = 3\n")  # a folder without __init__
    write("envs/__init__.py", "")
    write("envs/maze.py", "from utils.more import THREE\nfrom . import walls\nimport algorithms\n")
    write("envs/walls.py", "from appo.utils.errors import UsageError\n")
    write("algorithms.py", "HEIGHT = 1\n")
    maze = import_user_module("envs.maze")
    assert (maze.THREE, maze.algorithms.HEIGHT, maze.walls.UsageError) == (3, 1, UsageError)
    assert import_user_module("envs.maze") is maze


@pytest.mark.parametrize("name", ["envs.spec", "utils.errors", "algorithms.appo.config"])
def test_a_former_name_means_a_module_of_ours_where_the_folder_has_none(write: Write, name: str) -> None:
    write("other.py", "")
    assert import_user_module(name).__name__ == f"appo.{name}"


def test_a_former_name_means_a_module_of_ours_in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PACKAGE.parent.parent)
    assert import_user_module("envs.toys.toy").__name__ == "appo.envs.toys.toy"


def test_the_error_about_a_missing_name_has_the_name_that_was_asked_for(write: Write) -> None:
    write("utils.py", "")
    write("missing_name.py", "from utils import nothing_of_that_name\n")
    with pytest.raises(ImportError, match="nothing_of_that_name"):
        import_user_module("missing_name")
    with pytest.raises(ModuleNotFoundError, match=r"utils\.nowhere"):
        import_user_module("utils.nowhere")
