"""Packages of others that are met for real: each reads back what a run has sent, by the package's own reader."""

import base64
import hashlib
import json
import os
import re
import struct
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from appo.algorithms import cli, load_policy
from appo.algorithms.runtime.monitor.tracker_process import HEAD
from appo.algorithms.runtime.monitor.trackers import TRACKERS
from appo.algorithms.runtime.monitor.tracking import Tracker
from tests.integration.runs import Command, run_command
from tests.unit.runtime.monitor.test_tracking import FakeJanitor

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SHORT = {
    "env": "CartPole-v1", "inference": "serial", "train_for_env_steps": 6000, "experiment_summaries_interval": 0.2,
    "num_envs_per_worker": 4, "encoder_mlp_layers": "16",
}  # fmt: skip
SENT = ("env_steps", "reward/mean")
DEADLINE_SECONDS = 300.0


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder and a home of the test's own, so that no account, server or database of the user is touched."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_", "HF_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """A short run, whose records every reader has to find."""
    run = run_command(tmp_path_factory.mktemp("real") / "run", tensorboard=True, **SHORT)
    assert run.returncode == 0, run.stderr
    return run


def sent(run: Command, tracker: str, folder: Path) -> list[dict[str, float]]:
    """Send the records of the run as main does; return those that the tracker has to hold: all, in order."""
    settings = TRACKERS[tracker].settings(run.config | {"seed": 1}, 7.0)
    log = folder / f"{tracker}.log"
    process = Tracker(tracker, settings, log, FakeJanitor())
    for record in run.metrics:
        process.add(0, {name: value for name, value in record.items() if isinstance(value, int | float)})
    process.close(DEADLINE_SECONDS)
    assert (process._process.returncode, process.dropped) == (0, 0), log.read_text()
    return [{name: record[name] for name in SENT if name in record} for record in run.metrics]


def wandb_records(path: Path) -> Iterator[bytes]:
    """Yield the records of W&B's transaction log: LevelDB's log format behind a head of seven bytes."""
    content, place, parts = path.read_bytes(), 7, b""
    assert content.startswith(b":W&B")
    while place < len(content):
        left = 32768 - place % 32768  # of the block; no head of a record is cut
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + 7])
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def test_wandb_holds_every_record(run: Command, elsewhere: Path) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    records = sent(run, "wandb", elsewhere)
    (file,) = (elsewhere / "wandb").glob("offline-run-*/*.wandb")
    found = []
    for content in wandb_records(file):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content)
        if record.WhichOneof("record_type") == "history":
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            found.append({name: items[name] for name in SENT if name in items})
    assert found == records


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of sqlalchemy, which mlflow asks for
def test_mlflow_holds_every_record_in_its_default_store(run: Command, elsewhere: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    records = sent(run, "mlflow", elsewhere)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{elsewhere}/mlflow.db")
    (held,) = client.search_runs([client.get_experiment_by_name("appo").experiment_id])
    assert held.info.status == "FINISHED"
    assert held.data.params["env"] == "CartPole-v1"
    history = [(int(one.value), one.step) for one in client.get_metric_history(held.info.run_id, "env_steps")]
    assert history == [(record["env_steps"], record["env_steps"]) for record in records]


def test_trackio_holds_every_record(run: Command, elsewhere: Path) -> None:
    trackio = pytest.importorskip("trackio")
    records = sent(run, "trackio", elsewhere)
    (held,) = trackio.Api().runs("appo")
    assert re.fullmatch(r"run-[0-9a-f]{12}", held.name)
    found = trackio.sqlite_storage.SQLiteStorage.get_logs("appo", held.name)
    assert [{name: row[name] for name in SENT if name in row} for row in found] == records


def test_tensorboard_reads_every_record(run: Command) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reader = accumulators.EventAccumulator(str(run.directory / ".summary" / "p0"))
    reader.Reload()
    rows = [record for record in run.metrics if "reward/mean" in record]
    found = [(event.step, event.value) for event in reader.Scalars("reward/mean")]
    assert found == [(row["env_steps"], pytest.approx(row["reward/mean"], rel=1e-6)) for row in rows]
    tags = set(reader.Tags()["scalars"])
    assert {name for row in run.metrics for name in row} - set(HEAD) <= tags


class HubServer(BaseHTTPRequestHandler):
    """The part of the Hub that an upload and a download need, on this machine's own address."""

    files: ClassVar[dict[str, bytes]] = {}
    commit = "0" * 39 + "1"

    def log_message(self, format: str, *args: Any) -> None:
        """Keep requests off stderr."""

    def _answer(self, body: bytes, **headers: str) -> None:
        self.send_response(200)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: object) -> None:
        self._answer(json.dumps(value).encode(), Content_Type="application/json")

    def do_POST(self) -> None:
        """Make a repository, ask how files travel, or commit them."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.endswith("/repos/create"):
            self._json({"url": "http://127.0.0.1/me/cart", "name": "me/cart", "id": "1"})
        elif self.path.endswith("/validate-yaml"):
            self._json({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            ways = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in asked]
            self._json({"files": ways})
        else:
            assert "/commit/" in self.path
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._json({"success": True, "commitOid": self.commit, "commitUrl": "http://127.0.0.1/me/cart/commit/1"})

    def do_GET(self) -> None:
        """List the files, or send one."""
        if "/resolve/" in self.path:
            content = self.files[self.path.partition("/resolve/")[2].partition("/")[2]]
            etag = f'"{hashlib.sha256(content).hexdigest()}"'
            self._answer(content, ETag=etag, X_Repo_Commit=self.commit)
            return
        names = [{"type": "file", "path": name, "size": len(text), "oid": "1"} for name, text in self.files.items()]
        if "/tree/" in self.path:
            self._json(names)
            return
        siblings = [{"rfilename": name} for name in self.files]
        self._json({"id": "me/cart", "sha": self.commit, "siblings": siblings, "private": True, "tags": []})

    do_HEAD = do_GET


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, elsewhere: Path) -> Iterator[dict[str, bytes]]:
    """The files of a repository at a Hub that runs in this process."""
    HubServer.files.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubServer)
    thread = threading.Thread(target=partial(server.serve_forever, poll_interval=0.05))
    thread.start()
    constants = pytest.importorskip("huggingface_hub.constants")
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    yield HubServer.files
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_hub_client_sends_a_run_and_fetches_the_same_bytes(
    runs: Path, elsewhere: Path, hub: dict[str, bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.run("hub", [str(runs / "cartpole"), "--repo=me/cart", "--private"]) == 0, capfd.readouterr().err
    names = {Path(name).name for name in hub}
    assert names == {
        "README.md", "config.json", "MANIFEST.json", "model.safetensors", "optimizer.safetensors", "state.json",
    }  # fmt: skip
    assert cli.run("hub", ["--download=me/cart", f"--train_dir={elsewhere}"]) == 0
    for name, content in hub.items():
        if name.startswith("checkpoint_p0"):
            assert (elsewhere / "cart" / name).read_bytes() == content
    here, there = load_policy(runs / "cartpole").get_weights(), load_policy(elsewhere / "cart").get_weights()
    assert all((here[name] == there[name]).all() for name in here)
