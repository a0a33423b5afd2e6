"""`python -m docs.pictures [SCENE...]` trains for some minutes and makes docs/pictures again, or those of some scenes.

It needs the extras `[plots]`, `[video]` and `[box2d]`. What it draws is what the commands of the pages draw: nothing
here knows more of a run than a user sees.
"""

import argparse
import contextlib
import importlib
import io
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from appo.algorithms.runtime.monitor.panel import Snapshot, draw
from appo.algorithms.tools.top import ObservedRun
from appo.utils.command_line import own_command, say

PICTURES = Path(__file__).parent / "pictures"
COLUMNS, ROWS = 80, 24
EVERY_SECOND = "--experiment_summaries_interval=1"  # figures, for curves of short runs
LOOK_SECONDS = 0.25
SHARE_SHOWN = 0.6  # of the budget, at which the panel is drawn
FRAMES = 4  # of a video that stand side by side
GAP = 6  # pixels between them
SHRINK = 2  # pixels of a video that become one, in both directions

PANEL, CURVE, VIDEO, SEEDS, LINEAGE = "panel.svg", "learning_curve.png", "evaluation.png", "seeds.png", "lineage.png"


def first(train_dir: Path) -> None:
    """The run of docs/quickstart.md: its panel while it trains."""
    run = train_dir / "first"
    words = ("train", "--env=CartPole-v1", f"--train_dir={train_dir}", f"--experiment={run.name}", "--seed=1")
    with subprocess.Popen(own_command([*words, "--train_for_env_steps=200000", EVERY_SECOND])) as training:  # noqa: S603 (ours)
        shown = _at_work(training, run)
    if training.returncode or shown is None:
        raise SystemExit(f"{run.name} failed, or ended before anybody could look at it")
    draw_panel(shown, PICTURES / PANEL)


def landing(train_dir: Path) -> None:
    """A run that takes minutes: the curve that it leaves, and the video of an evaluation."""
    run = train_dir / "LunarLander-v3_1"
    _appo(
        "train", "--env=LunarLander-v3", f"--train_dir={train_dir}", f"--experiment={run.name}", "--seed=1",
        "--train_until_return=200", EVERY_SECOND,
    )  # fmt: skip
    draw_landing(run)


def draw_landing(run: Path) -> None:
    """Draw the curve of a run that has ended, and film and draw how its newest checkpoint plays."""
    _appo("plot", str(run), f"--output={PICTURES / CURVE}")
    _appo("evaluate", str(run), "--episodes=5", "--video_every_min=1")
    (video,) = (run / "eval/videos").glob("*.mp4")
    draw_frames(video, PICTURES / VIDEO)


def rates(train_dir: Path) -> None:
    """Two learning rates with three seeds each, as bands."""
    grid = ("--seeds=1,2,3", "--grid", "learning_rate=3e-4,1e-3")
    _appo(
        "launch", "--name=rates", f"--train_dir={train_dir}", *grid,
        "--", "--env=CartPole-v1", "--train_for_env_steps=100000", "--no_plot", EVERY_SECOND,
    )  # fmt: skip
    runs = sorted(str(path.parent) for path in train_dir.glob("rates/*/config.json"))
    _appo("plot", *runs, f"--output={PICTURES / SEEDS}")


def population(train_dir: Path) -> None:
    """Four policies with learning rates that are too small but for one, and what becomes of them."""
    run = train_dir / "population"
    _appo(
        "train", "--env=CartPole-v1", f"--train_dir={train_dir}", f"--experiment={run.name}", "--seed=1",
        "--num_policies=4", "--with_pbt", "--pbt_start_mutation=4e4", "--pbt_period_env_steps=2e4",
        "--per_policy", "learning_rate=1e-3,1e-4,1e-5,1e-6", "--train_for_env_steps=160000", "--no_plot",
    )  # fmt: skip
    _appo("plot", str(run), "--lineage", f"--output={PICTURES / LINEAGE}")


SCENES: Mapping[str, tuple[Callable[[Path], None], Sequence[str]]] = {
    "first": (first, (PANEL,)),
    "landing": (landing, (CURVE, VIDEO)),
    "rates": (rates, (SEEDS,)),
    "population": (population, (LINEAGE,)),
}
"""What is trained in an empty folder, and the pictures it gives."""


def draw_panel(snapshot: Snapshot, path: Path) -> None:
    """Write what `appo top` shows in a terminal of 80 x 24, as SVG with the fonts of whoever looks at it."""
    console = Console(
        record=True,
        file=io.StringIO(),
        width=COLUMNS,
        force_terminal=True,  # with colours, wherever this runs
        color_system="standard",
        no_color=False,
        highlight=False,
    )
    console.print(draw(snapshot, COLUMNS, ROWS))
    picture = console.export_svg(title=f"appo top {snapshot.name}", unique_id="panel")
    path.write_text(re.sub(r"\s*@font-face \{.*?\}", "", picture, flags=re.DOTALL), encoding="utf-8")


def draw_frames(video: Path, path: Path) -> None:
    """Write some pictures of a video side by side, from its first to its last, as small as a page wants them."""
    from matplotlib.image import imsave

    reader: Any = importlib.import_module("imageio_ffmpeg")
    count, _ = reader.count_frames_and_secs(str(video))
    chosen = {round(place) for place in np.linspace(0, count - 1, FRAMES)}
    pictures = reader.read_frames(str(video))
    width, height = next(pictures)["size"]
    frames = [np.frombuffer(frame, np.uint8) for number, frame in enumerate(pictures) if number in chosen]
    blocks = [f.reshape(height // SHRINK, SHRINK, width // SHRINK, SHRINK, 3).mean(axis=(1, 3)) for f in frames]
    gap = np.full((height // SHRINK, GAP, 3), 255)
    imsave(path, np.concatenate([one for block in blocks for one in (block, gap)][:-1], axis=1).astype(np.uint8))


def _at_work(training: "subprocess.Popen[bytes]", run: Path) -> Snapshot | None:
    """How a run looks when it has come so far; None if it ends before."""
    watched = ObservedRun(run)
    while training.poll() is None:
        if (run / "status.json").exists():
            shown = watched.look()
            if shown.state == "training" and (shown.overview.share or 0.0) >= SHARE_SHOWN:
                return shown
        with contextlib.suppress(subprocess.TimeoutExpired):
            training.wait(LOOK_SECONDS)
    return None


def _appo(*words: str) -> None:
    subprocess.run(own_command(words), check=True)  # noqa: S603 (our own program)


def main() -> None:
    """Make the pictures of the scenes that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scene", nargs="*", help=f"{', '.join(SCENES)}; none: all")
    asked = parser.parse_args().scene or list(SCENES)
    if unknown := set(asked) - SCENES.keys():
        parser.error(f"no scene {', '.join(sorted(unknown))}: there are {', '.join(SCENES)}")
    PICTURES.mkdir(exist_ok=True)
    for name in asked:
        make, pictures = SCENES[name]
        with tempfile.TemporaryDirectory(prefix="appo-pictures-") as train_dir:
            make(Path(train_dir))
        say("\n".join(f"drawn: {PICTURES / picture}" for picture in pictures))


if __name__ == "__main__":
    main()
