"""Several machines on Ray: learning, lost machines, scaling, bytes on the wire, CPU time, and the doctor's forecast.

    python -m benchmarks.promises.machines [--only learn chaos scale bytes cpu doctor ranks] [--quick]
        [--networks local 1gbit 100mbit delay] [--seeds 1 2 3] [--json=FILE]

- `learn`: CartPole to a mean return of 475, over each network.
- `chaos`: 30 kills of machines, 5 cuts of 20 seconds, a killed head; then counts, exit codes and leftovers.
- `scale`: an environment of 5 ms and 1 kB, 8 a machine, on 1, 2 and 4 machines.
- `bytes`: bytes that arrive at the head per sample, to the bytes of a slot; needs root.
- `cpu`: CPU time of the learner per sample with 4 machines, to that with as many actors on the head.
- `doctor`: samples/s by `appo doctor --ray`, to samples/s of a run, for four layouts.
- `ranks`: two learners with two machines, to 475, over each network; with `local` two machines for each learner.

`local` is `--ray=local:N`. The further networks need root and iproute2: a head and machines as network namespaces, see
`benchmarks/shared/hosts.py`; `delay` is 1 Gbit/s with 20 ms for each packet. On a local machine the Ray actor is
killed, on a host every process, Ray's included.
"""

import argparse
import contextlib
import os
import random
import re
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from appo.algorithms.cli import run_command
from appo.algorithms.runtime.processes.prctl import bound_to_us
from appo.utils.metrics import read_metrics
from appo.utils.system.machine import available_cores
from benchmarks.shared import promises, runs
from benchmarks.shared.hosts import Hosts, are_possible
from benchmarks.shared.measuring import ROOT
from benchmarks.shared.promises import Figure
from benchmarks.shared.runs import RunError, Timing
from benchmarks.shared.workloads import words_of
from tests.chaos.invariants import find_falling, find_unaccounted
from tests.chaos.killer import MARKER, kill, processes_of
from tests.chaos.runs import TrainingRun
from tests.integration.runs import Run

NETWORKS = {"local": ("", 0.0), "1gbit": ("1gbit", 0.0), "100mbit": ("100mbit", 0.0), "delay": ("1gbit", 0.02)}
"""Rate in words of tc, and delay of a packet in seconds."""
GOAL, EASY_GOAL = 475.0, 40.0
KILLS, CUTS, CUT_SECONDS = 30, 5, 20.0
MOST_SECONDS, HANG_SECONDS, GONE_SECONDS, NODE_SECONDS = 900.0, 180.0, 30.0, 120.0
POLL_SECONDS = 0.2
FAIR = {"RAY_worker_niceness": "0", "RAY_worker_register_timeout_seconds": "600"}
"""As `--ray=local:N` sets: with niceness 15 the actors of a host would starve beside the learner."""
ATTEMPTS, STARTED = 3, "Ray runtime started"
TERMINATED = 128 + signal.SIGTERM
ENVS = "benchmarks.promises.on_machines:"
FLAGS = {"log_format": "plain", "plot": False, "experiment_summaries_interval": 0.2, "reset_timeout_seconds": 600}
EIGHT = {"auto_tune": False, "num_workers": 1, "num_envs_per_worker": 8, "rollout": 16, "batch_size": 256,
         "use_rnn": False, "num_batches_per_iteration": 1, "ppo_epochs": 1}  # fmt: skip


class Cluster:
    """The machines of `local:N`, which a run starts itself.

    Args:
        ray: value of `--ray`.
        machines: number of machines.
    """

    within: Sequence[str] = ()

    def __init__(self, ray: str, machines: int) -> None:
        self.ray, self.machines = ray, machines

    def kill_machine(self, run: TrainingRun, rng: random.Random) -> None:
        """Kill a Ray actor."""
        found = [pid for pid in processes_of(run.marker) if _command(pid).startswith("ray::Machine")]
        if found:
            kill(rng.choice(sorted(found)))

    def restart_nodes(self) -> None:
        """Start the nodes again that Ray has given up."""

    def left(self) -> list[str]:
        """Return leftovers of an ended run on the machines."""
        return []


class HostCluster(Cluster):
    """Ray nodes on hosts, the head among the hosts without CPUs for machines.

    Args:
        hosts: hosts; host 0 is the head.
        folder: folder for temporary files.
    """

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        super().__init__(f"{hosts.address(0)}:6379", len(hosts.names) - 1)
        self.hosts, self.folder, self.within, self.marker = hosts, folder, hosts.within(0), secrets.token_hex(8)
        token = folder / "token"
        token.write_text(secrets.token_hex(32))
        of_ray = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"}
        os.environ |= of_ray | FAIR
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}
        for host in range(len(hosts.names)):
            self.start(host)

    def start(self, host: int) -> None:
        """Start the Ray node of a host."""
        address = self.hosts.address(host)
        words = ["--head", "--port=6379", "--num-cpus=0", "--include-dashboard=false"]
        if host:
            words = [f"--address={self.ray}", f"--num-cpus={available_cores()}"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--node-ip-address={address}"]
        variables = {MARKER: self.marker, "RAY_TMPDIR": str(self.folder), "TMPDIR": str(self.folder)}
        command = [*self.hosts.within(host), *command, "--object-store-memory=200000000", *words]
        log_path = self.folder / f"node_{host}.log"
        for _ in range(ATTEMPTS):  # Ray waits for 30 s, which a busy machine may exceed
            with log_path.open("w") as log:
                node = subprocess.Popen(
                    command, stdout=log, stderr=log, env={**os.environ, **variables}, stdin=subprocess.DEVNULL,
                    cwd=ROOT, preexec_fn=bound_to_us(),  # noqa: PLW1509 (it calls the system alone)
                )  # fmt: skip
            _holds(lambda node=node: STARTED in log_path.read_text() or node.poll() is not None, NODE_SECONDS)
            if STARTED in log_path.read_text():
                self.nodes[host] = node
                return
            self.hosts.kill(host)
        raise RunError(f"the node of host {host} does not start", log_path.read_text())

    def kill_machine(self, run: TrainingRun, rng: random.Random) -> None:
        """Kill all processes of a host, and start the Ray node again."""
        host = rng.randint(1, self.machines)
        self.hosts.kill(host)
        self.start(host)

    def restart_nodes(self) -> None:
        """Start the nodes again that Ray has given up after a cut."""
        for host, node in list(self.nodes.items()):
            if node.poll() is not None:
                print(f"Ray has given up host {host}", flush=True)
                self.hosts.kill(host)
                self.start(host)

    def left(self) -> list[str]:
        """Return leftovers of an ended run on the machines: processes, and folders of machines."""
        lines = map(_command, processes_of(self.marker))
        found = [line[:80] for line in lines if any(word in line for word in ("ray::Machine", "multiprocessing"))]
        return found + [path.name for path in self.folder.glob("appo-machine-*")]


@contextmanager
def cluster_of(network: str, machines: int) -> Iterator[Cluster]:
    """Return a cluster with a number of machines over a network."""
    if network == "local":
        yield Cluster(f"local:{machines}", machines)
        return
    folder = Path(tempfile.mkdtemp(prefix="apr", dir="/tmp"))  # short: names of sockets have at most 107 bytes
    before = dict(os.environ)
    try:
        with Hosts(machines + 1, *NETWORKS[network]) as hosts:
            yield HostCluster(hosts, folder)
    finally:
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(folder, ignore_errors=True)


def started(cluster: Cluster, folder: str, **flags: object) -> TrainingRun:
    """Start a training with the machines of a cluster."""
    program = (*cluster.within, sys.executable, str(ROOT / "train_appo.py"))
    given = {**FLAGS, "ray": cluster.ray, **flags}
    env = str(given.pop("env", "CartPole-v1"))
    return TrainingRun(Path(folder), *words_of(given), env=env, program=program, small=())


def networks_of(given: argparse.Namespace) -> list[str]:
    """Return the networks to measure, all possible ones by default; `local` alone in a trial."""
    return given.networks or (list(NETWORKS) if are_possible() and not given.quick else ["local"])


def output(run: TrainingRun) -> str:
    return run.stdout + run.stderr


def learned(cluster: Cluster, goal: float, **flags: object) -> dict[str, Any]:
    """Train CartPole to a goal; return env steps and seconds.

    Raises:
        RunError: the run failed, or missed the goal in time.
    """
    limits = {"train_until_return": goal, "train_for_seconds": MOST_SECONDS}
    with tempfile.TemporaryDirectory(prefix="appo-benchmark-") as folder:
        with started(cluster, folder, **limits, **flags) as run:
            _holds(lambda: run.process.poll() is not None, MOST_SECONDS + HANG_SECONDS)
        status = Run(run.directory).status
        if run.process.returncode or not str(status["reason"]).startswith("the mean return has reached"):
            raise RunError(f"{cluster.ray} has not come to {goal:g}", output(run))
        return {"env_steps": status["totals"]["env_steps"], "seconds": status["seconds"]}


def learn(given: argparse.Namespace) -> dict[str, Any]:
    """Train CartPole over every network."""
    goal, seeds = (EASY_GOAL, given.seeds[:1]) if given.quick else (GOAL, given.seeds)
    return _learned({network: (network, 3, {}) for network in networks_of(given)}, goal, seeds, "with 3 machines over")


def ranks(given: argparse.Namespace) -> dict[str, Any]:
    """Train CartPole with two learners and two machines, which the learners divide unless each starts its own."""
    goal, seeds = (EASY_GOAL, given.seeds[:1]) if given.quick else (GOAL, given.seeds)
    machines = 1 if given.quick else 2
    layouts = {network: (network, machines, {"num_learners": 2}) for network in networks_of(given)}
    return _learned(layouts, goal, seeds, f"2 learners with machines ({machines}) over")


def _learned(
    layouts: Mapping[str, tuple[str, int, dict[str, object]]], goal: float, seeds: Sequence[int], what: str
) -> dict[str, Any]:
    figures, found = [], {}
    for name, (network, machines, flags) in layouts.items():
        of_seeds, missed = [], 0
        with cluster_of(network, machines) as cluster:
            for seed in seeds:
                try:
                    of_seeds.append(learned(cluster, goal, seed=seed, **flags))
                except RunError as error:
                    missed += 1
                    print(f"{error}\n{error.traceback}", flush=True)
        print(f"{name}: {of_seeds}", flush=True)
        found[name] = of_seeds
        figures.append(Figure(f"CartPole to {goal:g} {what} {name}: seeds of {len(seeds)} that missed", missed, 0))
    return promises.result_of(figures, runs=found)


def acting(text: str) -> set[str]:
    """Return the numbers of the machines that act, by the log of a run."""
    found: set[str] = set()
    for line in text.splitlines():
        if listed := re.search(r"machines that act \(\d+\): (.*)", line):
            found = set(re.findall(r"(\d+) \(", listed[1]))
        elif event := re.search(r"machine (\d+) \([^)]*\) (joins|is lost)", line):
            (found.add if event[2] == "joins" else found.discard)(event[1])
    return found


def chaos(given: argparse.Namespace) -> dict[str, Any]:
    """Kill machines, cut the network and kill the head, over every network."""
    figures, found = [], {}
    for network in networks_of(given):
        with tempfile.TemporaryDirectory(prefix="appo-benchmark-") as folder, cluster_of(network, 2) as cluster:
            found[network] = wrong = Chaos(cluster, folder, given).run()
        print(f"{network}: {wrong}", flush=True)
        named = {"events that the run did not outlive in time": "hangs", "wrong counts and exit codes": "wrong",
                 "leftovers": "left"}  # fmt: skip
        figures += [
            Figure(f"{network}, {wrong['events']}: {what}", len(wrong[name]), 0) for what, name in named.items()
        ]
    return promises.result_of(figures, networks=found)


class Chaos:
    """Three starts of a run, with kills and cuts in the first and a killed head in the second."""

    def __init__(self, cluster: Cluster, folder: str, given: argparse.Namespace) -> None:
        self.cluster, self.folder = cluster, folder
        self.kills, self.cuts, self.seconds = (1, 1, 5.0) if given.quick else (KILLS, CUTS, CUT_SECONDS)
        if not isinstance(cluster, HostCluster):
            self.cuts = 0
        self.rng = random.Random(given.seeds[0])  # noqa: S311 (no secret)
        self.hangs: list[str] = []
        self.wrong: list[str] = []
        self.left: list[str] = []
        self._earlier = 0  # length of the log at the start of the run
        self._names = set(_names())

    def run(self) -> dict[str, Any]:
        """Return what went wrong, by kind."""
        self._start(self._events, signal.SIGTERM)
        self._start(lambda run: None, signal.SIGKILL)
        self._start(lambda run: None, signal.SIGTERM)
        events = f"{self.kills} kills, {self.cuts} cuts, a killed head"
        return {"events": events, "hangs": self.hangs, "wrong": self.wrong, "left": self.left}

    def _start(self, events: Callable[[TrainingRun], None], end: int) -> None:
        directory = Path(self.folder, "train_dir", "run")
        state = Run(directory).state() if directory.exists() else {"env_steps": 0, "samples": 0, "discarded": 0}
        records, self._earlier = len(read_metrics(directory / "metrics.jsonl")), len(self._whole_log())
        flags = {**EIGHT, "env": f"{ENVS}small_there", "save_every_sec": 2, "seed": 1}
        with started(self.cluster, self.folder, **flags) as run:
            began = int(state["env_steps"])
            self._await(run, self._all_act, "begin")
            self._await(run, lambda: run.env_steps() > began, "first steps")
            events(run)
            if end == signal.SIGKILL:
                self._await(run, lambda: Run(directory).state()["env_steps"] > began, "checkpoint")
            run.process.send_signal(end)
            code, awaited = run.wait(HANG_SECONDS).exit_code, TERMINATED if end == signal.SIGTERM else -end
            self.wrong += [f"exit code {code} in place of {awaited}"] * (code != awaited)
            self._look_for_leftovers(run)
        if end == signal.SIGTERM:
            self.wrong += find_unaccounted(state, Run(directory).totals)
            self.wrong += find_falling(read_metrics(directory / "metrics.jsonl")[records:])

    def _events(self, run: TrainingRun) -> None:
        for number in range(self.kills):
            lost = self._log().count(" is lost: ")
            self.cluster.kill_machine(run, self.rng)
            self._await(run, lambda lost=lost: self._log().count(" is lost: ") > lost, f"loss of a machine {number}")
            self._await_all(run, f"kill {number}")
        for number in range(self.cuts):
            assert isinstance(self.cluster, HostCluster)
            host = self.rng.randint(1, self.cluster.machines)
            self.cluster.hosts.cut(host, off=True)
            time.sleep(self.seconds)
            self.cluster.hosts.cut(host, off=False)
            self._await_all(run, f"cut {number}")

    def _all_act(self) -> bool:
        self.cluster.restart_nodes()
        return len(acting(self._log())) == self.cluster.machines

    def _await_all(self, run: TrainingRun, what: str) -> None:
        self._await(run, self._all_act, f"all machines after {what}")
        before = run.env_steps()
        self._await(run, lambda: run.env_steps() > before, f"steps after {what}")

    def _whole_log(self) -> str:
        """Return the log of the bridge; the console shows ten new warnings a minute."""
        path = Path(self.folder, "train_dir", "run", "logs", "bridge.log")
        return path.read_text() if path.exists() else ""

    def _log(self) -> str:
        return self._whole_log()[self._earlier :]

    def _await(self, run: TrainingRun, holds: Callable[[], bool], what: str) -> None:
        begin = time.monotonic()
        if _holds(lambda: holds() or run.process.poll() is not None, HANG_SECONDS) and run.process.poll() is None:
            print(f"{what}: {time.monotonic() - begin:.1f} s", flush=True)
            return
        self.hangs.append(what)
        if run.process.poll() is not None:
            raise RunError(f"the run ended before: {what}", output(run))

    def _look_for_leftovers(self, run: TrainingRun) -> None:
        """Look for leftovers until there are none, for a while."""
        found: list[str] = []

        def is_clean() -> bool:
            found[:] = [f"{pid} {_command(pid)[:80]}" for pid in processes_of(run.marker)]
            found.extend([*self.cluster.left(), *run.left_behind(), *(_names() - self._names)])
            return not found

        if not _holds(is_clean, GONE_SECONDS):
            self.left += found


def scale(given: argparse.Namespace) -> dict[str, Any]:
    """Measure 1, 2 and 4 machines."""
    timing, numbers = (Timing(3.0, 6.0), (1, 2)) if given.quick else (Timing(10.0, 30.0), (1, 2, 4))
    figures, found = [], {}
    for network in networks_of(given):
        found[network] = rates = {}
        for machines in numbers:
            with cluster_of(network, machines) as cluster:
                rates[machines] = observe(cluster, timing, env=f"{ENVS}small_there", **EIGHT).samples_per_second
        print(f"{network}: env steps/s by machines {rates}", flush=True)
        for machines in numbers[1:]:
            missing = 100 * (1 - rates[machines] / machines / rates[1])
            what = f"env steps/s of {machines} machines missing to {machines} times {rates[1]:.0f}, {network}"
            figures.append(Figure(what, missing, 10.0, "%"))
    return promises.result_of(figures, env_steps_per_second=found)


def observe(cluster: Cluster, timing: Timing, **flags: object) -> runs.Observed:
    """Observe a run with the machines of a cluster in the steady state."""
    with tempfile.TemporaryDirectory(prefix="appo-benchmark-") as folder:
        of_run = {"train_dir": folder, "experiment": "run", "ray": cluster.ray, "env": "CartPole-v1"}
        words = words_of({**FLAGS, "experiment_summaries_interval": 0.5, **of_run, **flags})
        metrics = Path(folder, "run", "metrics.jsonl")
        return runs.observe(
            [sys.executable, str(ROOT / "train_appo.py"), *words],
            lambda: runs.progress_of(read_metrics(metrics)),
            timing._replace(prefix=tuple(cluster.within)),
            Path(folder, "output.log"),
        )


def wire(given: argparse.Namespace) -> dict[str, Any]:
    """Count the bytes that arrive at the head, of slots and everything else, with one machine."""
    if not are_possible():
        raise RunError("bytes on the wire are counted at a host: this part needs root and iproute2", "")
    samples = 500 if given.quick else 10_000
    cases = {"1 kB": ("small_there", "off", 1.1), "Pong": ("pong_there", "off", 1.1),
             "Pong, lz4": ("pong_there", "lz4", 0.4)}  # fmt: skip
    figures, found = [], {}
    with cluster_of("1gbit", 1) as cluster:
        assert isinstance(cluster, HostCluster)
        for name, (env, compression, most) in list(cases.items())[:: 2 if given.quick else 1]:
            flags = {**EIGHT, "env": ENVS + env, "ray_compression": compression}
            with tempfile.TemporaryDirectory(prefix="appo-benchmark-") as folder:
                with started(cluster, folder, **flags) as run:
                    steps, nbytes = _steps(run, samples // 5), cluster.hosts.received(0)
                    steps, nbytes = _steps(run, steps + samples) - steps, cluster.hosts.received(0) - nbytes
                own = float(re.findall(r"--ray: (\d+) bytes a sample", run.stdout)[0])
            found[name] = {"samples": steps, "bytes": nbytes, "of_slot": own}
            print(f"{name}: {found[name]}", flush=True)
            figures.append(Figure(f"bytes on the wire to bytes of the slot, {name}", nbytes / steps / own, most))
    return promises.result_of(figures, cases=found)


def _steps(run: TrainingRun, least: int) -> int:
    """Wait for so many samples, trained on or not, in a new record; return the samples."""
    path, found = run.directory / "metrics.jsonl", [0]

    def has_grown() -> bool:
        last = (read_metrics(path) or [{"samples": 0, "discarded": 0}])[-1]
        found.append(int(last["samples"] + last["discarded"]))
        return found[-1] > found[-2] and found[-1] >= least

    run.wait_until(has_grown, f"{least} samples", MOST_SECONDS)
    return found[-1]


def cpu(given: argparse.Namespace) -> dict[str, Any]:
    """Compare actors of the head with actors of machines at equal rates, in turns: an environment of 5 ms and 1 kB."""
    pairs, timing, machines = (1, Timing(3.0, 8.0), 1) if given.quick else (5, Timing(10.0, 30.0), 4)
    layouts = {"alone": ("", 1 + machines), "with machines": (f"local:{machines}", 1)}
    both: dict[str, list[float]] = {name: [] for name in layouts}
    for pair in range(pairs):
        for name in sorted(both, reverse=bool(pair % 2)):
            ray, workers = layouts[name]
            seen = observe(Cluster(ray, machines), timing, env=f"{ENVS}small", **EIGHT | {"num_workers": workers})
            both[name].append(seen.cpu_microseconds["learner"])
            print(f"{name}: learner {both[name][-1]:.1f} us, {seen.samples_per_second:,.0f} samples/s", flush=True)
    ratio = statistics.median(b / a for a, b in zip(*both.values(), strict=True))
    return promises.result_of([Figure(f"CPU time of the learner per sample, {pairs} pairs", ratio, 1.1)], pairs=both)


def doctor(given: argparse.Namespace) -> dict[str, Any]:
    """Compare forecasts with runs."""
    local = [("local", 1, "small"), ("local", 1, "large"), ("local", 2, "small"), ("local", 2, "large")]
    hosts = [("1gbit", 1, "small"), ("1gbit", 2, "small"), ("100mbit", 1, "large"), ("100mbit", 2, "large")]
    layouts = (hosts if are_possible() and given.networks != ["local"] else local)[: 1 if given.quick else None]
    timing = Timing(3.0, 8.0) if given.quick else Timing(15.0, 30.0)
    figures, found = [], {}
    for network, machines, env in layouts:
        with cluster_of(network, machines) as cluster:
            predicted = forecast(cluster, env)
            seen = observe(cluster, timing, env=ENVS + env).samples_per_second
        name = f"{machines} x {network}, {env}"
        found[name] = {"predicted": predicted, "measured": seen}
        print(f"{name}: {found[name]}", flush=True)
        figures.append(Figure(f"forecast of the doctor, off by, {name}", 100 * abs(predicted / seen - 1), 25.0, "%"))
    return promises.result_of(figures, layouts=found)


def forecast(cluster: Cluster, env: str) -> float:
    """Return the samples/s that the doctor predicts for the cluster."""
    command = [sys.executable, "-m", "appo.algorithms.cli", "doctor", f"--env={ENVS}{env}", f"--ray={cluster.ray}"]
    text = runs.run_to_end(command, cluster.within)
    found = re.search(r"samples/s here, (.+?) with ([\d, ]+) machines", " ".join(text.split()))
    if found is None:
        raise RunError("the doctor predicts nothing", text)
    rates = dict(zip(found[2].split(", "), found[1].split(", "), strict=True))
    number = re.fullmatch(r"([\d.]+)([kM]?)", rates[str(cluster.machines)])
    assert number
    return float(number[1]) * {"": 1, "k": 1e3, "M": 1e6}[number[2]]


def _holds(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition holds; return whether the condition holds."""
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return holds


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def _names() -> set[str]:
    """Return the names that a run could leave behind."""
    shared, temporary = Path("/dev/shm"), Path("/tmp")  # noqa: S108 (only read)
    return {str(path) for path in (*shared.iterdir(), *temporary.glob("appo-ray-*"))}


PARTS = {"learn": learn, "chaos": chaos, "scale": scale, "bytes": wire, "cpu": cpu, "doctor": doctor, "ranks": ranks}


def add_networks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--networks", nargs="*", choices=NETWORKS, help="networks (default: all that are possible)")


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # all that was started ends too
    return promises.ask("machines", "Several machines on Ray.", PARTS, add_networks)


if __name__ == "__main__":
    sys.exit(run_command(main))
