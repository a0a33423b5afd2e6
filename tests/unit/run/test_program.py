"""Where the script of a program stands when it begins to train, and what of it workers can know."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import gymnasium
import pytest
from gymnasium.envs.registration import EnvSpec as Registration

from appo.algorithms.run.config import parse_train
from appo.algorithms.run.program import check_program, refuse_imported_script, script_of
from appo.utils.errors import UsageError

GUARDED = """
def start():
    call()

if __name__ == "__main__":
    if True:
        start()
"""
OTHER_GUARDS = [
    "if '__main__' == __name__:\n    call()\n",
    "if __name__ in ('__main__', '__mp_main__'):\n    call()\n",
    "if __name__ != '__main__':\n    pass\nelse:\n    call()\n",
]
NOT_GUARDED = {
    "call()\n": 1,
    "def start():\n    call()\n\nstart()\n": 4,
    "x = 1\nif x:\n    call()\n": 3,
    "try:\n    call()\nfinally:\n    pass\n": 2,
}
"""Script -> the line outside of functions at which it trains."""


def run_as_main(path: Path, text: str, monkeypatch: pytest.MonkeyPatch, call: Callable[[], None]) -> None:
    """Run a script as Python does, which calls `call`."""
    path.write_text(text)
    main = ModuleType("__main__")
    vars(main).update(__file__=str(path), call=call)
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(compile(text, str(path), "exec"), vars(main))


@pytest.mark.parametrize("text", [GUARDED, *OTHER_GUARDS])
def test_a_guarded_script_may_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    called = []

    def call() -> None:
        refuse_imported_script(has_workers=True)
        called.append(True)

    run_as_main(tmp_path / "script.py", text, monkeypatch, call)
    assert called == [True]


@pytest.mark.parametrize("text", NOT_GUARDED)
def test_one_that_is_not_is_told_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    def call() -> None:
        refuse_imported_script(has_workers=False)  # nobody imports it
        refuse_imported_script(has_workers=True)

    with pytest.raises(UsageError) as caught:
        run_as_main(tmp_path / "script.py", text, monkeypatch, call)
    assert str(caught.value) == (
        f"line {NOT_GUARDED[text]} of script.py trains, and every worker process, which imports script.py, would train"
        ' there again: put what it does under `if __name__ == "__main__":`'
    )


@pytest.mark.parametrize("file", [None, "<stdin>", "gone.py"])
def test_what_is_no_file_needs_no_guard(monkeypatch: pytest.MonkeyPatch, file: str | None) -> None:
    main = ModuleType("__main__")
    vars(main).update({} if file is None else {"__file__": file})
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert script_of("__main__") is None
    exec(compile("refuse(has_workers=True)", "<stdin>", "exec"), vars(main) | {"refuse": refuse_imported_script})


@pytest.mark.parametrize("flag", ["encoder_custom", "callbacks", "postprocess_inputs"])
def test_what_workers_would_have_to_import_of_a_notebook_is_refused(monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    config = parse_train(["--env=CartPole-v1", f"--{flag}=__main__:Mine"])
    check_program(config, has_workers=False)
    with pytest.raises(UsageError) as caught:
        check_program(config, has_workers=True)
    assert str(caught.value) == (
        f"--{flag}=__main__:Mine: worker processes cannot import a notebook, a session or stdin: put it into a file"
        f' my_module.py and give {flag}="my_module:Mine", or train with inference="serial"'
    )


def test_what_main_alone_calls_may_be_of_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    check_program(parse_train(["--env=CartPole-v1", "--custom_summaries=__main__:mine"]), has_workers=True)


def test_an_id_that_a_notebook_has_registered_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers do not run the cell that has registered it."""
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))

    class Mine(gymnasium.Env[int, int]):
        __module__ = "__main__"

    monkeypatch.setitem(gymnasium.registry, "Mine-v0", Registration("Mine-v0", entry_point=Mine))
    config = parse_train(["--env=Mine-v0"])
    check_program(config, has_workers=False)
    with pytest.raises(UsageError) as caught:
        check_program(config, has_workers=True)
    assert str(caught.value) == (
        "env=Mine-v0 is registered by a notebook, a session or stdin, which worker processes cannot import: give what"
        " it makes, as env=Mine"
    )


def test_an_evaluator_cannot_know_a_class_of_the_program() -> None:
    config = parse_train(["--env=<program>:Mine", "--eval_every_sec=5"])
    with pytest.raises(UsageError, match="--eval_every_sec evaluates in a command of its own, which cannot know"):
        check_program(config, has_workers=False)
