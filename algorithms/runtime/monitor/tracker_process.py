"""The process of a tracker, a script: sends records to Weights & Biases, Trackio or MLflow, whose package it imports.

Main writes JSON lines to stdin: first the name of the tracker with the settings, then one record per line. The script
runs without packages of appo.
"""

import contextlib
import importlib
import json
import queue
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from typing import Any, BinaryIO

NOTHING_SENT = 3  # exit code after a failure before the first record was sent
FAULT = "error: "  # begins the line of the log with the failure
MOST_WAITING = 1000  # records, for a slow tracker
HEAD = ("elapsed_seconds", "env_steps", "samples", "discarded", "policy")


class WandbClient:
    """A run at Weights & Biases, or at Trackio, whose package has the API of wandb."""

    def __init__(self, package: str, settings: Mapping[str, Any]) -> None:
        self._run = importlib.import_module(package).init(**settings)
        # Steps of W&B must increase, and several policies may be at equal env steps: W&B counts records instead.
        self._counts_records = package == "wandb"

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Send figures, which include the env steps."""
        self._run.log(dict(figures), **({} if self._counts_records else {"step": step}))

    def finish(self) -> None:
        """Send all figures that wait."""
        self._run.finish()


class MlflowClient:
    """A run at the MLflow server of `MLFLOW_TRACKING_URI`; a resumed run is found by the tag `appo.id`.

    Args:
        settings: experiment, name of the run, tags and flags.
    """

    PARAMETERS_AT_ONCE, LONGEST_PARAMETER = 100, 500
    FORBIDDEN = re.compile(r"[^\w\-. :/]")  # in the name of a metric

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._mlflow = mlflow = importlib.import_module("mlflow")
        experiment = mlflow.set_experiment(settings["experiment"])
        same = f"tags.`appo.id` = '{settings['tags']['appo.id']}'"
        found = mlflow.search_runs([experiment.experiment_id], filter_string=same, max_results=1, output_format="list")
        if found:
            mlflow.start_run(run_id=found[0].info.run_id)
            return
        mlflow.start_run(run_name=settings["run_name"], tags=settings["tags"])
        parameters = iter(settings["config"].items())
        while some := dict(islice(parameters, self.PARAMETERS_AT_ONCE)):
            mlflow.log_params({name: str(value)[: self.LONGEST_PARAMETER] for name, value in some.items()})

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Send figures at an env step."""
        self._mlflow.log_metrics({self.FORBIDDEN.sub("_", name): value for name, value in figures.items()}, step=step)

    def finish(self) -> None:
        """Mark the run as ended."""
        self._mlflow.end_run()


CLIENTS: Mapping[str, Callable[[Mapping[str, Any]], WandbClient | MlflowClient]] = {
    "wandb": partial(WandbClient, "wandb"),
    "trackio": partial(WandbClient, "trackio"),
    "mlflow": MlflowClient,
}


def _read(stream: BinaryIO, waiting: "queue.SimpleQueue[dict[str, Any] | None]") -> None:
    """Queue main's records at once, so a slow tracker drops the oldest and never fills the pipe; at last queue None."""
    try:
        for line in stream:
            if not line.endswith(b"\n"):  # main was killed while it wrote
                break
            if waiting.qsize() >= MOST_WAITING:
                with contextlib.suppress(queue.Empty):  # the tracker took the last record meanwhile
                    waiting.get_nowait()
            waiting.put_nowait(json.loads(line))
    finally:  # also after an error, or the tracker would wait for ever
        waiting.put_nowait(None)


def _main() -> None:
    for name in ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "ALRM", "XCPU"):  # main ends the process
        signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_IGN)
    # Not `sys.stdin`: the interpreter's exit would wait for the thread and abort.
    stream = open(0, "rb", closefd=False)  # noqa: SIM115 - as long as the process lives
    first = stream.readline()
    if not first.endswith(b"\n"):  # main ended before the settings were written
        return
    asked = json.loads(first)
    settings = asked["settings"]
    waiting: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(stream, waiting), daemon=True).start()
    sent = 0
    try:
        client = CLIENTS[asked["tracker"]](settings)
        while (record := waiting.get()) is not None:
            policy = record.pop("policy")
            prefix = f"p{policy}/" if settings["config"].get("num_policies", 1) > 1 else ""
            figures = {name if name in HEAD else prefix + name: value for name, value in record.items()}
            client.log(figures, int(record.get("env_steps", 0)))
            sent += 1
        client.finish()
    except Exception as error:  # packages raise errors of any class
        traceback.print_exc()
        sys.stderr.write(f"{FAULT}{type(error).__name__}: {next(iter(str(error).splitlines()), '')}\n")
        sys.exit(1 if sent else NOTHING_SENT)


if __name__ == "__main__":
    _main()
