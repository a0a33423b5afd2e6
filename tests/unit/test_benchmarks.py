import argparse
import itertools
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from appo.algorithms.models.build import build_model
from appo.algorithms.run.config import parse_train
from appo.algorithms.run.tuning.network import probe
from appo.envs.spec import ActionPart, ActionSpec
from appo.utils.errors import UsageError
from benchmarks.peers import __main__ as peers
from benchmarks.peers import apex_peers
from benchmarks.promises import bare, machines, on_machines, soak, under_fire
from benchmarks.report import __main__ as report
from benchmarks.report import performance_page, results_page
from benchmarks.scores import learning, population
from benchmarks.scores.trials import TRIALS, Summary
from benchmarks.shared import hosts, markdown, measuring, process_tree, promises, runs
from benchmarks.shared.measuring import Point
from benchmarks.shared.process_tree import Process
from benchmarks.shared.promises import Figure
from benchmarks.shared.runs import Observed, Progress
from benchmarks.shared.workloads import WORKLOADS, words_of
from benchmarks.speed import end_to_end, first_hour, growth, network_alone, placements
from benchmarks.speed.actor_process import random_actions
from tests.patience import HANG_SECONDS


def run_of(speed: float, *, pss: float = 100.0, games: float = 0.0, discarded: float = 0.0) -> dict[str, Any]:
    return Observed(speed, discarded, pss + games, pss, 4, 0.5, {"actor": 2.0, "learner": 1e6 / speed})._asdict()


class TestFigures:
    def test_median_and_extremes(self) -> None:
        assert measuring.spread([3.0, 1.0, 2.0, 10.0]) == (2.5, 1.0, 10.0, 4)

    def test_rate_of_a_staircase(self) -> None:
        """100 samples every second, looked at four times a second; where in a step the window begins says little."""
        stairs = [Point(i / 4, i // 4 * 100) for i in range(100)]
        assert measuring.rate(stairs) == pytest.approx(100, rel=0.01)
        assert measuring.rate(stairs[3:]) == pytest.approx(100, rel=0.01)

    def test_lines_of_code_are_statements(self) -> None:
        """Docstrings, comments and blank lines explain; a call over three lines is three lines."""
        source = '"""What it is."""\n\n# why\nx = f(\n    1,\n)\n\n\ndef g() -> None:\n    """Nothing."""\n    return\n'
        assert first_hour.lines_of_code(source) == 5

    def test_limit(self) -> None:
        costs = {"environment": 340.0, "inference": 45.0, "training": 115.0}
        runs = [run_of(1000), run_of(3000), run_of(2000)]
        result = {"cores": 2, "unit_costs": costs, "costs": [costs], "runs": runs}
        assert end_to_end.limit(result) == 4000
        assert end_to_end.reached(result) == (0.5, 0.25, 0.75, 3)

    def test_runs_are_compared_with_the_costs_just_before(self) -> None:
        costs = [{"environment": us, "inference": 0.0, "training": 100.0} for us in (900.0, 100.0, 400.0)]
        runs = [run_of(1000), run_of(3000), run_of(2000)]
        result = {"cores": 2, "unit_costs": costs[2], "costs": costs, "runs": runs}
        assert end_to_end.reached(result) == (0.5, 0.3, 0.5, 3)

    def test_costs_in_the_limit(self) -> None:
        """The cheapest way to act, and every epoch."""
        cost = {"lowest": 0, "highest": 0, "runs": 3}
        result = {
            "forward": {"16": {"median": 3.0, **cost}, "32": {"median": 2.0, **cost}},
            "acting": {"median": 2.5, **cost},
            "update": {"median": 7.0, **cost},
            "epochs": 4,
        }
        assert network_alone.inference_microseconds(result) == 2
        assert network_alone.training_microseconds(result) == 28

    def test_multiplications(self) -> None:
        """Kernels once per pixel, matrices once."""

        class Model(nn.Module):
            rnn_state_size = 0

            def __init__(self) -> None:
                super().__init__()
                self.kernel, self.matrix = nn.Conv2d(3, 8, 2, 2), nn.Linear(8 * 16, 5)

            def act(self, obs: dict[str, Tensor], first: Tensor, rnn_state: Tensor) -> Tensor:
                features: Tensor = self.matrix(self.kernel(obs["obs"]).flatten(1))
                return features

        of_kernel = 3 * 8 * 4 * 16
        found = network_alone.multiplications(Model(), {"obs": torch.zeros(1, 3, 8, 8)})
        assert found == (of_kernel + 8 * 16 * 5, of_kernel)

    def test_multiplications_in_bf16_are_the_same(self) -> None:
        config = parse_train(["--env=toy/Spaces-v0", "--env_kwargs=observation=image_hwc"])
        spec = probe(config).spec
        model = build_model(config.model, spec)
        obs = {"obs": torch.zeros(1, *spec.observations["obs"].shape, dtype=torch.uint8)}
        in_float32 = network_alone.multiplications(model, obs)
        model.compute_in_bf16()
        assert network_alone.multiplications(model, obs) == in_float32
        assert in_float32[1] == 3 * 32 * 8 * 8 * 8 * 9  # pixels of 36 x 40, by a kernel of 8 x 8 at steps of 4
        assert model.actor.bf16

    def test_share_of_the_best_placement(self) -> None:
        found = {"central": [run_of(50)], "local": [run_of(100)], "serial": [run_of(60)], "auto": [run_of(95)]}
        assert placements.auto_to_best({"placements": found}) == 0.95

    def test_ratios_leave_games_out_of_memory(self) -> None:
        contenders = {
            "appo": [run_of(300, pss=100, games=1000), run_of(100), run_of(200)],
            "cleanrl_envpool": [run_of(50, pss=400)],
        }
        assert peers.ratios({"contenders": contenders}) == {"cleanrl_envpool": (4, 0.25)}
        assert peers.ratios({"contenders": {"cleanrl_envpool": [run_of(50)]}}) == {}


class TestRuns:
    def test_summary(self) -> None:
        found = runs.summary([run_of(100), run_of(400, discarded=0.02), run_of(200)])
        assert found["samples_per_second"] == (200, 100, 400, 3)
        assert found["discarded_share"] == 0.02
        assert not found["counts"]
        assert found["cpu_microseconds"] == {"actor": 2.0, "learner": 5000.0}

    def test_discarded_share_is_that_of_the_window(self) -> None:
        assert runs.discarded_share([Progress(1, 100, 50), Progress(2, 400, 50), Progress(3, 1000, 150)]) == 0.1
        assert runs.discarded_share([Progress(1, 0), Progress(2, 0)]) == 0

    def test_cpu_time_by_role(self) -> None:
        before = [Process(1, "actor", 1.0), Process(2, "actor", 5.0), Process(3, "learner", 2.0)]
        after = [Process(1, "actor", 1.5), Process(2, "actor", 6.0), Process(4, "game", 9.0)]
        assert runs.cpu_by_role(before, after) == {"actor": 1.5}

    def test_a_run_is_seen_and_ended_with_its_children(self, tmp_path: Path) -> None:
        trainer, log = tmp_path / "trainer.py", tmp_path / "output.log"
        trainer.write_text(
            "import json, subprocess, time\n"
            "child = subprocess.Popen(['sleep', '1000'])\n"
            "for i in range(10**6):\n"
            "    print(json.dumps({'seconds': i / 100, 'samples': i}), flush=True)\n"
            "    time.sleep(0.01)\n"
        )
        before = {p.pid for p in process_tree.processes(os.getpid())}  # other tests may have left some
        members: set[int] = set()

        looks = itertools.count(1)

        def progress() -> list[Progress]:
            members.update({p.pid for p in process_tree.processes(os.getpid())} - before)
            return [Progress(i / 100, i) for i in range(20 * next(looks))] if runs.reported_progress(log) else []

        timing = runs.Timing(0.0, 0.0, ("nice", "-n", "1"))
        seen = runs.observe([sys.executable, str(trainer)], progress, timing, log)
        assert seen.samples_per_second == pytest.approx(100)
        assert seen.processes == 2
        assert len(members) == 2
        deadline = time.monotonic() + HANG_SECONDS
        while any(process_tree.command_of(pid) for pid in members):  # a zombie has none
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def test_a_run_that_ends_by_itself_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(runs.RunError, match="echo 'no luck' ended before it trained") as raised:
            runs.observe(["echo", "no luck"], list, runs.Timing(0.0, 0.1), tmp_path / "output.log")
        assert raised.value.traceback == "no luck\n"

    def test_progress_of_a_peer(self, tmp_path: Path) -> None:
        log = tmp_path / "output.log"
        assert runs.reported_progress(log) == []
        log.write_text('starting\n{"seconds": 1.5, "samples": 1024}\n12\n{"other": 1}\n{"seconds": 2, "samples": 20')
        assert runs.reported_progress(log) == [Progress(1.5, 1024)]

    def test_progress_of_several_policies_is_their_sum(self) -> None:
        records = [
            {"elapsed_seconds": at, "policy": policy, "samples": samples, "discarded": 1}
            for at, policy, samples in [(1.0, 0, 10), (1.0, 1, 20), (2.0, 0, 15), (2.0, 1, 26)]
        ]
        expected = [(1.0, 10, 1), (1.0, 30, 2), (2.0, 35, 2), (2.0, 41, 2)]
        assert runs.progress_of(records) == [Progress(*one) for one in expected]


class TestPromises:
    def test_a_result_is_what_its_figures_say(self, capsys: pytest.CaptureFixture[str]) -> None:
        kept, broken = Figure("growth", 1.234, 10.0, "MiB/h"), Figure("cycles that failed", 1, 0)
        results = {"cartpole": promises.result_of([kept, broken], minutes=30)}
        assert promises.figures_of(results["cartpole"]) == [kept, broken]
        assert promises.show({"cartpole": promises.result_of([kept])}) == 0
        assert promises.show(results) == 1
        assert capsys.readouterr().out.splitlines()[1:] == [
            "ok    growth: 1.23 MiB/h (at most 10 MiB/h)",
            "FAIL  cycles that failed: 1 (at most 0)",
        ]

    def test_slopes_of_a_long_run(self) -> None:
        """An hour, a look a minute: growth counts after the warm-up, and of those who were there all the time."""
        minutes = range(60)
        grows = [soak.Look(60 * m, 100 + max(0, 20 - m) + m / 10, 10 + m // 50, 3) for m in minutes]
        still = [soak.Look(60 * m, 50.0, 5, 2) for m in minutes]
        found = soak.slopes({"actor 7": grows, "main 1": still, "other 9": still[:5]}, warm_up_seconds=1200)
        assert set(found) == {"actor 7", "main 1"}
        assert found["actor 7"]["anon_mib"] == pytest.approx(6.0)
        assert found["actor 7"]["open_files"] > 0.5
        assert found["main 1"] == {"anon_mib": 0, "open_files": 0, "threads": 0, "anon_mib_at_end": 50.0}
        memory, files, threads = soak.figures(found, hours=2 / 3)
        assert (memory.value, memory.kept) == (pytest.approx(6.0), True)
        assert memory.what == "growth of memory in 40 min, actor 7"
        assert (files.kept, threads.value) == (False, 0)

    def test_fire_opens_when_training_has_begun(self, monkeypatch: pytest.MonkeyPatch) -> None:
        roles = {1: "main", 2: "actor_0", 3: "janitor", 4: "starting"}
        killed: list[int] = []
        monkeypatch.setattr(under_fire, "roles_of", lambda marker, main: roles)
        monkeypatch.setattr(under_fire, "kill", killed.append)
        fire = under_fire.Fire("marker", 1, kill_seconds=2.0, seed=0)
        fire.tick(0.0, trains=False)
        fire.tick(100.0, trains=True)
        assert killed == []
        for now in (103.1, 103.2, 106.3):
            fire.tick(now, trains=True)
        assert (killed, fire.kills) == ([2, 2], 2)

    def test_parts_are_selected_and_a_part_that_fails_is_a_broken_promise(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fails(given: argparse.Namespace) -> dict[str, Any]:
            raise runs.RunError("no run", "the last line")

        kept = lambda given: promises.result_of([Figure("seeds", len(given.seeds), 3)])  # noqa: E731
        monkeypatch.setattr(sys, "argv", ["x", "--only", "good", "--quick"])
        assert promises.ask("x", "", {"bad": fails, "good": kept}) == 0
        monkeypatch.setattr(sys, "argv", ["x"])
        assert promises.ask("x", "", {"bad": fails, "good": kept}) == 1
        assert capsys.readouterr().out.splitlines() == [
            "ok    seeds: 3 (at most 3)",
            "bad: no run",
            "the last line",
            "",
            "FAIL  bad: parts that could not be measured: 1 (at most 0)",
            "ok    seeds: 3 (at most 3)",
        ]
        monkeypatch.setattr(sys, "argv", ["x", "--quick", "--json=y"])
        with pytest.raises(UsageError, match="--quick is a trial"):
            promises.ask("x", "", {})

    def test_machines_that_act(self) -> None:
        log = "machines that act (2): 0 (10.77.0.2), 1 (10.77.0.3)\nmachine 1 (10.77.0.3) is lost: died\n"
        assert machines.acting(log) == {"0"}
        assert machines.acting(log + "bridge: machine 2 (10.77.0.3) joins\n") == {"0", "2"}
        assert machines.acting("") == set()

    def test_a_switch_sends_packets_to_their_hosts_after_the_delay(self) -> None:
        """Two packets for host 1, and two that belong to nobody; the descriptor of the end closes the switch."""
        pairs = [socket.socketpair(type=socket.SOCK_DGRAM) for _ in range(2)]
        for ours, theirs in pairs:
            ours.setblocking(False)
            theirs.settimeout(60.0)
        end, closes = os.pipe()

        def packet(address: tuple[int, ...], content: bytes) -> bytes:
            return bytes([0x45, *[0] * 15, *address]) + content

        delay = 0.05
        switch = threading.Thread(target=hosts.forward, args=([ours.fileno() for ours, _ in pairs], delay, end))
        begin = time.monotonic()
        for address, content in (((10, 77, 0, 2), b"a"), ((10, 77, 0, 9), b"b"), ((9, 77, 0, 2), b"c")):
            pairs[0][1].send(packet(address, content))
        pairs[0][1].send(packet((10, 77, 0, 2), b"d"))
        switch.start()
        assert [pairs[1][1].recv(100)[20:] for _ in range(2)] == [b"a", b"d"]
        assert time.monotonic() - begin >= delay
        os.close(closes)
        switch.join()
        os.close(end)
        for pair in pairs:
            for one in pair:
                one.close()

    def test_all_supervision_that_is_switched_off_exists(self) -> None:
        for owner, name, _ in (*bare.IN_MAIN, *bare.IN_WORKERS, *bare.in_networks()):
            assert name in vars(owner)

    def test_supervision_that_has_moved_away_is_an_error(self) -> None:
        class Emptied:
            """Without a call of its own."""

        with pytest.raises(AttributeError, match="Emptied'> has no __call__ to switch off"):
            bare.replace_all([(Emptied, "__call__", len)])

    def test_environments_for_machines_are_slow_on_the_head_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        slept: list[float] = []
        monkeypatch.setattr(on_machines.time, "sleep", slept.append)
        for variables in ({}, {"RAY_RAYLET_PID": "1"}):
            monkeypatch.setattr(os, "environ", variables)
            env = on_machines.small_there()
            observation, _ = env.reset(seed=1)
            assert observation.nbytes == 1000
            assert env.step(1)[1] == 1.0
        assert slept == [on_machines.HEAD_SECONDS, on_machines.STEP_SECONDS, on_machines.STEP_SECONDS]


class TestProcessTree:
    def test_stat(self) -> None:
        text = "42 (a (b) c) S 7 " + " ".join("0" for _ in range(9)) + " 150 50 " + " ".join("0" for _ in range(30))
        assert process_tree.parse_stat(text) == ("a (b) c", 7, 200 / process_tree.TICKS_PER_SECOND)

    def test_anonymous(self) -> None:
        assert process_tree.parse_anonymous("VmRSS:\t  100 kB\nRssAnon:\t      24 kB\n") == 24 * 1024
        assert process_tree.parse_anonymous("Name:\tkthreadd\n") == 0

    def test_pss(self) -> None:
        assert process_tree.parse_pss("Rss:  100 kB\nPss:      24 kB\nPss_Dirty: 8 kB\n") == 24 * 1024
        assert process_tree.parse_pss("") == 0

    @pytest.mark.parametrize(
        ("name", "output", "role"),
        [
            ("python", "/runs/x/logs/actor_12.log", "actor"),
            ("python", "/runs/x/logs/policy_worker_0.1.log", "policy_worker"),
            ("vizdoom", "/runs/x/logs/actor_0.log", "game"),
            ("python", "/dev/null", "other"),
        ],
    )
    def test_role(self, name: str, output: str, role: str) -> None:
        assert process_tree.role_of(name, output) == role


class TestFiles:
    def test_results_replace_those_of_their_workload(self, tmp_path: Path) -> None:
        path = tmp_path / "new" / "x.json"
        assert measuring.earlier(path, "a") == {}
        measuring.save(path, "placements", {"a": {"n": 1}, "b": {"n": 2}})
        measuring.save(path, "placements", {"a": {"n": 3}})
        assert measuring.earlier(path, "a")["n"] == 3
        assert measuring.earlier(path, "b")["n"] == 2
        assert {"commit", "date"} < set(measuring.earlier(path, "b"))

    def test_a_result_that_is_added_to_keeps_when_it_was_measured_before(self, tmp_path: Path) -> None:
        arguments = argparse.Namespace(json=tmp_path / "x.json", add=True)
        for _ in range(3):
            runs.each_workload("end_to_end", arguments, ["a"], lambda _, before: {"n": before.get("n", 0) + 1})
        found = measuring.earlier(arguments.json, "a")
        assert found["n"] == 3
        assert [set(marks) for marks in found["before"]] == [{"commit", "date"}] * 2
        found["before"][1] |= {"commit": "0ld", "date": "1999-01-01 00:00"}
        assert "Measured on 1999-01-01 to " in markdown.measured({"a": found})
        assert "0ld" in markdown.measured({"a": found})

    def test_machines_and_benchmarks_are_not_mixed(self, tmp_path: Path) -> None:
        path = tmp_path / "x.json"
        measuring.save(path, "peers", {})
        with pytest.raises(UsageError, match="give another --json"):
            measuring.save(path, "placements", {})
        content = measuring.read(path)
        content["machine"]["cores"] = 512
        path.write_text(json.dumps(content))
        with pytest.raises(UsageError, match=r"peers on .*, 512,"):
            measuring.save(path, "peers", {})


def test_random_actions_are_allowed() -> None:
    parts = (ActionPart("gaussian", 2), ActionPart("categorical", 3), ActionPart("bernoulli", 2))
    drawn = random_actions(ActionSpec(parts, low=(-0.5, -np.inf), high=(0.25, np.inf)), 50, 4)
    assert drawn.shape == (50, 4, 5)
    assert drawn.dtype == np.float32
    lowest, highest = drawn.min((0, 1)), drawn.max((0, 1))
    assert (lowest >= [-0.5, -1, 0, 0, 0]).all()
    assert (highest <= [0.25, 1, 2, 1, 1]).all()
    assert highest[2:].tolist() == [2, 1, 1]


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_are_command_lines(name: str, tmp_path: Path) -> None:
    config = WORKLOADS[name].config(train_dir=tmp_path)
    assert config.env.env == WORKLOADS[name].env
    assert peers.contenders(name, ("appo", *peers.PEERS))[:2] == ["appo", "sample_factory"]


class TestReport:
    def test_the_pages_are_what_the_results_say(self) -> None:
        for name, text in report.pages(report.read_all(report.RESULTS)).items():
            assert (report.DOCS / name).read_text() == text, f"{name}: run `python -m benchmarks.report`"

    def test_machines_have_chapters_of_their_own(self) -> None:
        here = measuring.machine() | {"gpu": None}
        there = here | {"cpu": "another", "gpu": "H1", "cores": 16}
        by_placement = {name: [run_of(1234)] for name in placements.PLACEMENTS}
        results = {"pong": {"placements": by_placement, "date": "2026-11-21 10", "commit": "abc"}}
        text = performance_page.render(
            [{"benchmark": "placements", "machine": m, "results": results} for m in (here, there)]
        )
        assert text.count("| `pong` | 1,234 (1 run) |") == 2
        assert "## 16 cores of another, H1" in text
        assert "## On a GPU" not in text
        assert "Measured on 2026-11-21, commit abc." in text

    def test_growth(self) -> None:
        roles = {"actor": measuring.spread([50.0])._asdict(), "learner": measuring.spread([700.0])._asdict()}
        costs = {
            "envs": {"512": measuring.spread([110.0])._asdict()},
            "actors": {"16": roles},
            "slots": {"128": 1234.4},
        }
        results = {name: {"costs": of, "date": "2026-11-21 10", "commit": "abc"} for name, of in costs.items()}
        text = performance_page.render([{"benchmark": "growth", "machine": measuring.machine(), "results": results}])
        assert "| 512 envs | vector step of an actor | 110.0 us |" in text
        assert "| 16 actors | learner, per slot | 700.0 us |" in text
        assert "| 128 slots | memory of all processes | 1234 MiB |" in text
        assert "learner per slot    700.0" in growth.table(results)

    def test_promises(self) -> None:
        figures = [Figure("growth, actor 7", 11.5, 10.0, "MiB/h"), Figure("threads added", 0.0, 0.5)]
        results = {"cartpole": promises.result_of(figures, date="2026-11-21 10", commit="abc")}
        text = performance_page.render([{"benchmark": "soak", "machine": measuring.machine(), "results": results}])
        assert "| growth, actor 7 | 11.5 MiB/h **not kept** | 10 MiB/h |" in text
        assert "| threads added | 0 | 0.5 |" in text

    def test_learning(self) -> None:
        reached, missed = learning.Learned(80_000, 7.25, True, 476.0), learning.Learned(9, 300.0, False, None)
        pong = learning.Learned(500_000, 840.25, False, -12.345)
        results = {
            "fp32": {"seeds": {"1": reached._asdict(), "2": missed._asdict()}},
            "pong_sample_factory": {"seeds": {"2": pong._asdict()}},
        }
        results = {name: {**of, "date": "2026-11-21 10", "commit": "abc"} for name, of in results.items()}
        text = performance_page.render([{"benchmark": "learning", "machine": measuring.machine(), "results": results}])
        assert "| **appo**, fp32 | 80,000 in 7.2 s | 9 to nothing in 300.0 s |" in text
        assert "| Sample Factory 2.1.1 |  | 500,000 to -12.3 in 840.2 s |" in text

    def test_all_who_learn_can_be_started(self) -> None:
        assert learning.PONG_BY_SAMPLES.budget()["train_for_env_steps"] == 2_000_000
        assert "train_for_env_steps" not in learning.PONG_BY_TIME.budget()
        counts = {"sample_factory": 2, "stable_baselines3": 1}  # flags and maker; hyperparameters
        for contender in learning.CONTENDERS.values():
            parse_train(words_of({**contender.flags, **contender.task.budget()}))
            if contender.peer:
                driver, name = contender.words
                assert (learning.DRIVERS / driver).read_text().count(f'"{name}": ') >= counts[contender.peer]

    def test_populations_and_self_play_have_a_section(self) -> None:
        trained = population.Trained([500.0, 20.0], copies=3, mutations=4, rates=[1e-3, 1e-6], seconds=80.0)
        _, section = performance_page.SECTIONS["population"]
        assert section({"alone": {"seeds": {"2": trained._asdict()}}}).splitlines()[-1] == (
            "| alone, seed 2 | 500.0, 20.0 | 20.0 | 3 | 4 |"
        )
        of_pool = {"mean": [0.3, 0.3, 0.4], "farthest": 0.0667, "win_rate": 0.5}
        _, section = performance_page.SECTIONS["self_play"]
        assert section({"past": {"seeds": {"1": of_pool}}}).splitlines()[-1] == (
            "| past, seed 1 | 0.300, 0.300, 0.400 | 0.067 | 0.50 |"
        )

    def test_unknown_results_are_not_left_out(self) -> None:
        with pytest.raises(UsageError, match="no section for results of x"):
            performance_page.render([{"benchmark": "x", "machine": measuring.machine(), "results": {}}])


class TestApexPeers:
    def test_each_peer_counts_with_its_best_number_of_threads(self) -> None:
        speeds = {"apex": [400.0, 500.0, 600.0], "stable_baselines3_1": [90.0, 100.0, 110.0]}
        more = {
            "stable_baselines3_2": [200.0, 125.0, 50.0],
            "stable_baselines3_8_envs": [250.0],
            "cleanrl_dqn_1": [50.0],
        }
        found = {name: [run_of(speed) for speed in of_one] for name, of_one in (speeds | more).items()}
        result = {"what": "", "seconds": 1, "contenders": found}
        assert apex_peers.ratios(result) == {
            "stable_baselines3 with its best number of threads": 4.0,
            "cleanrl_dqn with its best number of threads": 10.0,
            "stable_baselines3 with 8 environments": 2.0,
        }
        assert "ours is 4.00 times stable_baselines3 with its best" in apex_peers.table({"pong": result})
        assert apex_peers.ratios({**result, "contenders": {"stable_baselines3_1": found["stable_baselines3_1"]}}) == {}

    @pytest.mark.parametrize("workload", apex_peers.WORKLOADS)
    def test_both_sides_use_every_step_as_often(self, workload: str) -> None:
        config = parse_train(apex_peers.WORKLOADS[workload].words())
        learning = config.learning
        assert (learning.replay_ratio, learning.double_q, learning.dueling) == (8.0, False, False)
        assert (learning.batch_size // apex_peers.USES) * apex_peers.USES == learning.batch_size
        assert learning.learning_starts == apex_peers.LEARNING_STARTS


@pytest.mark.parametrize(
    ("mean", "seeds", "said"), [(24.0, 1, "reached"), (23.85, 1, "within the standard error"), (23.5, 1, "missed"),
                                (22.5, 2, "within the standard error")]
)  # fmt: skip
def test_the_standard_error_of_a_single_seed_is_of_its_episodes(mean: float, seeds: int, said: str) -> None:
    trial = TRIALS["vizdoom_defend_center_published"]
    found = results_page._verdict(trial, trial.mode, Summary(mean, 2.2, seeds, 100 * seeds))
    assert found == f"; {said}: 24"
