"""Packages that `--track` selects, and the settings of a run for each package."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

LONGEST_NAME = 100  # of a run in its id, which has 128 characters at most
LOCATION_FLAGS = ("train_dir", "experiments_root", "config", "init_from", "input", "output")
"""Flags that name folders of this machine, which are not sent."""


def run_id(flags: Mapping[str, Any], begun: float) -> str:
    """Return a unique name of a run, equal after a resume.

    Args:
        flags: flags of the run, with its seed.
        begun: start of the run (seconds since 1970): groups of runs, and --restart_behavior, repeat names and seeds.
    """
    origin = hashlib.sha256(repr((flags["experiments_root"], flags["seed"], begun)).encode()).hexdigest()
    return f"{flags['experiment'][:LONGEST_NAME]}-{origin[:12]}"


def _shared(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in flags.items() if name not in LOCATION_FLAGS}


def _group(flags: Mapping[str, Any]) -> str | None:
    return flags["wandb_group"] or flags["experiments_root"] or None


def wandb_settings(flags: Mapping[str, Any], begun: float) -> dict[str, object]:
    """Return the arguments of `wandb.init`."""
    return {
        "project": flags["wandb_project"],
        "entity": flags["wandb_user"] or None,
        "group": _group(flags),
        "job_type": flags["wandb_job_type"] or None,
        "tags": list(flags["wandb_tags"]),
        "name": flags["experiment"],
        "id": run_id(flags, begun),
        "resume": "allow",
        "config": _shared(flags),
    }


def trackio_settings(flags: Mapping[str, Any], begun: float) -> dict[str, object]:
    """Return the arguments of `trackio.init`. Trackio identifies a run by name, so the name is the id."""
    wandb = wandb_settings(flags, begun)
    return {name: wandb[name] for name in ("project", "group", "resume", "config")} | {"name": wandb["id"]}


def mlflow_settings(flags: Mapping[str, Any], begun: float) -> dict[str, object]:
    """Return the settings of `tracker_process.MlflowClient`."""
    tags = {"appo.id": run_id(flags, begun), "appo.group": _group(flags) or "", "appo.job": flags["wandb_job_type"]}
    return {
        "experiment": flags["wandb_project"],
        "run_name": flags["experiment"],
        "tags": tags | {f"appo.tag.{number}": tag for number, tag in enumerate(flags["wandb_tags"])},
        "config": _shared(flags),
    }


class TrackerKind(NamedTuple):
    """A value of `--track`.

    Attributes:
        settings: function from flags and start time of a run to the settings of the tracker's client.
        remedy: advice to a user if each start fails.
    """

    settings: Callable[[Mapping[str, Any], float], dict[str, object]]
    remedy: str


TRACKERS: Mapping[str, TrackerKind] = {
    "wandb": TrackerKind(wandb_settings, "wandb login, or WANDB_MODE=offline where there is no network"),
    "trackio": TrackerKind(trackio_settings, 'pip install --upgrade "appo[trackio]"'),
    "mlflow": TrackerKind(mlflow_settings, 'pip install --upgrade "appo[mlflow]", or MLFLOW_TRACKING_URI of a server'),
}
"""Values of `--track`: names of packages and of extras; `tracker_process.CLIENTS` has the client of each."""


def asked_trackers(track: Sequence[str], with_wandb: bool) -> list[str]:
    """Return the trackers of the flags `--track` and `--with_wandb` without repetition."""
    return list(dict.fromkeys([*(["wandb"] if with_wandb else []), *track]))
