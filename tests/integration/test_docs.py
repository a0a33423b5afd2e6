"""The code of the documentation runs as it stands there: files in a folder of one's own, commands with a budget."""

from pathlib import Path

import pytest

from appo.utils.command_line import own_command
from tests.integration.elsewhere import run
from tests.markdown import ROOT, blocks, commands

BUDGET = ("--train_for_env_steps=2000", "--seed=1", "--no_tensorboard", "--no_plot", "--num_workers=1")


@pytest.mark.slow
@pytest.mark.parametrize("page", ["own_env.md", "own_model.md", "callbacks.md", "from_sample_factory.md"])
def test_code_of_ones_own_runs_in_a_folder_of_ones_own(tmp_path: Path, page: str) -> None:
    """Every block of Python that names its file is written there, beside modules with our names; then commands run."""
    ran = []
    for block in blocks(ROOT / "docs" / page):
        if block.file:
            path = tmp_path / block.file
            path.parent.mkdir(exist_ok=True)
            (path.parent / "__init__.py").touch()
            path.write_text(block.text)
            for name in ("utils.py", "envs.py"):
                (tmp_path / name).write_text("raise RuntimeError('imported from the working directory')\n")
        for words in commands(block) if block.text.startswith("appo ") else ():
            if words[1] in ("train", "enjoy") and (tmp_path / "utils.py").exists():  # after the files
                extra = BUDGET if words[1] == "train" else ("--max_num_episodes=1",)
                run(*own_command([*words[1:], *extra]), cwd=tmp_path)
                ran.append(words[1])
    assert "train" in ran
