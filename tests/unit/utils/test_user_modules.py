"""Files of the user's that have names of ours."""

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import utils.errors
from utils.user_modules import import_user_module

Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes files into the working directory; what was imported from there is forgotten at the end."""
    monkeypatch.chdir(tmp_path)
    path, finders, modules = list(sys.path), list(sys.meta_path), set(sys.modules)

    def write_file(name: str, text: str) -> None:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))

    yield write_file
    sys.path[:], sys.meta_path[:] = path, finders
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def test_a_file_called_utils_beside_a_module_is_the_one_that_it_imports(write: Write) -> None:
    write("utils.py", "def double(x):\n    return 2 * x\n")
    write(
        "beside_env.py",
        """
        import utils
        from utils import double
        from utils.errors import UsageError  # no file of the user's: ours

        def late():
            from utils import double as again
            return utils.double(2), double(3), again(4), UsageError
        """,
    )
    assert import_user_module("beside_env").late() == (4, 6, 8, utils.errors.UsageError)
    assert sys.modules["utils"] is utils  # ours stay ours
    assert "user_files.utils" in sys.modules


def test_packages_of_the_users_with_names_of_ours(write: Write) -> None:
    write("utils/__init__.py", "import utils.more\nTHREE = utils.more.THREE\n")
    write("utils/more.py", "THREE = 3\n")
    write("envs/__init__.py", "")
    write("envs/maze.py", "from utils import THREE\nfrom utils.more import THREE as same\nfrom . import walls\n")
    write("envs/walls.py", "import algorithms.ops\nHEIGHT = 1\n")
    maze = import_user_module("envs.maze")
    assert (maze.THREE, maze.same, maze.walls.HEIGHT) == (3, 3, 1)
    assert import_user_module("envs.maze") is maze
    assert import_user_module("envs.spec").__name__ == "envs.spec"  # which only we have


def test_without_such_names_nothing_is_changed(write: Write) -> None:
    write("plain_module.py", "from utils import errors\n")
    finders = list(sys.meta_path)
    assert import_user_module("plain_module").errors is utils.errors
    assert sys.meta_path == finders


def test_what_is_missing_is_said_by_the_name_that_was_asked_for(write: Write) -> None:
    write("utils.py", "")
    write("missing_name.py", "from utils import nothing_of_that_name\n")
    with pytest.raises(ImportError, match="nothing_of_that_name"):
        import_user_module("missing_name")
    with pytest.raises(ModuleNotFoundError, match=r"utils\.nowhere"):
        import_user_module("utils.nowhere")
