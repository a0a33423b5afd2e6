"""`appo doctor` checks in half a minute whether machine, installation and environment are fit for training."""

import importlib
import json
import math
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from appo.algorithms.models.config import MLPS, encoder_names
from appo.algorithms.run.config import Config, resolve
from appo.algorithms.run.defaults import chosen_in, told
from appo.algorithms.run.directory.page import version_of
from appo.algorithms.run.machines.examine import examine
from appo.algorithms.run.placement import choose_placement, plan_workers
from appo.algorithms.run.preload import preloaded
from appo.algorithms.run.ranks.meeting import share_of
from appo.algorithms.run.tuning.choice import in_unit, is_open, report
from appo.algorithms.run.tuning.measure import Measurement, enter, measure_run, require_answer
from appo.algorithms.runtime.messages import WorkerFailed
from appo.algorithms.runtime.processes import fork_server, inquiry
from appo.algorithms.runtime.processes.janitor import Janitor
from appo.algorithms.runtime.ranks import Rank
from appo.algorithms.tools.choosing import STEPS, choice
from appo.algorithms.tools.examine_env import Examination, send_examination
from appo.algorithms.tools.flags import DoctorConfig
from appo.envs.make import FAMILIES, check_name
from appo.envs.masks import masks_said
from appo.envs.spaces import NO_BOUND
from appo.envs.spec import MASK_KEY, SINGLE_KEY, ActionSpec, EnvSpec
from appo.utils.command_line import apart, complain, say
from appo.utils.errors import AppoError, Interrupted, text_of
from appo.utils.system import limits, machine
from appo.utils.system.devices import cuda_obstacle, has_gpu
from appo.utils.system.signal_watch import SignalWatch
from appo.utils.tracebacks import traceback_of
from appo.utils.values import shown

REQUIRED = (
    "torch",
    "numpy",
    "gymnasium",
    "faster-fifo",
    "tensorboardX",
    "safetensors",
    "psutil",
    "threadpoolctl",
    "rich",
)
IMPORTED = ("torch", "faster_fifo")  # compiled for a version of Python and a kind of machine
OPTIONAL = {
    "matplotlib": "plots",
    "imageio-ffmpeg": "video",
    **{family.package: family.extra for family in FAMILIES},
    "pettingzoo": "multiagent",
    "onnxruntime": "onnx",
    "huggingface_hub": "hub",
    "wandb": "wandb",
    "trackio": "trackio",
    "mlflow-skinny": "mlflow",
    "optuna": "tune",
}
FEW_FILES, LITTLE_MEMORY, LITTLE_SHARED = 1024, 2 << 30, 64 << 20
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (where others leave theirs, not we ours)
START_SECONDS, EXAM_SECONDS = 30.0, 20.0
LEAK_BYTES, LEAK_FILES = 8 << 20, 8
# Limits of sizes for learning: observations, actions, rewards.
LARGE_NUMBER, SMALL_NUMBER = 20.0, 0.05
FAR, WIDEST, NARROWEST, WIDEST_MAPPED = 0.5, 10.0, 0.3, 1e4
MANY_NUMBERS = 10_000  # of an observation without a convolution
LARGE_REWARD, SMALL_REWARD, RARE_REWARD = 1e3, 1e-3, 1e4
HUGE_REWARD, TINY_REWARD = 1e6, 1e-4  # where the first values of a critic, near 0.01, hide returns, or vanish in them
State = Literal["ok", "note", "bad"]
KINDS = {
    "categorical": "choices",
    "bins": "bins",
    "bernoulli": "bits",
    "gaussian": "numbers",
    "tanh_gaussian": "squashed numbers",
}


class Finding(NamedTuple):
    """The result of one check: fine, a note, or an obstacle to training."""

    name: str
    state: State
    text: str
    flags: dict[str, Any] = {}  # noqa: RUF012 (read only) - recommended flags


def doctor(config: DoctorConfig, given: Mapping[str, object]) -> int:
    """Print all findings; return 0 if nothing prevents training, else 1.

    Raises:
        UsageError: flags of training contradict each other.
    """
    found = []
    with apart(as_json=config.json):
        for finding in findings(given):
            found.append(finding)
            if not config.json:
                say(f"{finding.state:5} {finding.name:12} {finding.text}")
    ok = all(finding.state != "bad" for finding in found)
    if config.json:
        recommended = {name: value for finding in found for name, value in finding.flags.items()}
        checks = [{"name": f.name, "state": f.state, "text": f.text} for f in found]
        say(json.dumps({"ok": ok, "checks": checks, "recommended": recommended}))
    else:
        say("nothing is in the way of training" if ok else "training will not work before what is bad has changed")
    return int(not ok)


def findings(given: Mapping[str, object]) -> Iterator[Finding]:
    """Yield findings one after the other; those of an environment if flags of training are given."""
    yield from of_installation()
    yield from of_machine()
    folder = Path(tempfile.mkdtemp(prefix="appo-doctor-"))
    try:
        with SignalWatch() as signals, Janitor() as janitor:
            inquire = partial(inquiry.Inquiry, log_path=folder / "probe.log", signals=signals, janitor=janitor)
            yield of_processes(janitor, inquire)
            if not given:
                return
            config, _ = resolve({**given, "experiment": folder.name})  # of which there is no run
            if config.env.env:
                yield from of_environment(config, inquire, partial(examine, janitor=janitor, signals=signals))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def of_installation() -> Iterator[Finding]:
    """Check the installed packages, and load the compiled packages."""
    versions = {name: version_of(name) for name in ("appo", *REQUIRED)}
    missing = [name for name in REQUIRED if versions[name] is None]
    text = ", ".join(f"{name} {found}" for name, found in versions.items() if found)
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    lack = f"{', '.join(missing)} missing: pip install -c constraints.txt -e ."
    yield Finding("packages", "bad" if missing else "ok", lack if missing else text)
    for module in IMPORTED:
        try:
            importlib.import_module(module)
        except Exception as error:  # a broken binary may raise anything
            yield Finding(module, "bad", f"cannot be imported: {type(error).__name__}: {text_of(error)}")
    extras = [f"{name} (appo[{extra}])" for name, extra in OPTIONAL.items() if version_of(name) is None]
    yield Finding("extras", "ok", f"not installed: {', '.join(extras)}" if extras else "all are installed")


def of_machine() -> Iterator[Finding]:
    """Report the cores, GPU, memory and open files available to a run."""
    cores = machine.available_cores()
    yield Finding("cores", "ok" if cores > 1 else "note", f"{cores}, {machine.processor_name() or 'unknown processor'}")
    yield _gpu()
    free = machine.available_memory_bytes()
    yield Finding("memory", "ok" if free >= LITTLE_MEMORY else "note", f"{_size(free)} free")
    if SHARED_MEMORY.is_dir():
        room = shutil.disk_usage(SHARED_MEMORY).free
        little = ": enough for us, not for every environment (docker run --shm-size=1g)" * (room < LITTLE_SHARED)
        yield Finding(str(SHARED_MEMORY), "note" if little else "ok", f"{_size(room)} free{little}")
    limits.raise_limit()
    files = limits.limit()
    few = files is not None and files < FEW_FILES
    yield Finding("open files", "note" if few else "ok", f"{files or 'any number'} allowed{': raise ulimit -n' * few}")


def of_processes(janitor: Janitor, inquire: Callable[..., inquiry.Inquiry]) -> Finding:
    """Check whether processes start, and how fast."""
    seconds = []
    try:
        fork_server.start_fork_server(janitor, preloaded(with_torch=True), with_torch=True)
        for _ in range(2):
            begin = time.perf_counter()
            with inquire(try_nothing, (), method="forkserver") as started:
                started.answer(START_SECONDS)
                seconds.append(time.perf_counter() - begin)
    except Interrupted:
        raise
    except (AppoError, OSError) as error:
        return Finding("processes", "bad", f"cannot be started: {text_of(error)}")
    return Finding("processes", "ok", f"start in {1e3 * seconds[1]:.0f} ms, after {seconds[0]:.1f} s for the first one")


def _of_one_rank(found: Measurement, ranks: int) -> Measurement:
    rank = Rank(0, ranks) if ranks > 1 else None
    return found._replace(probe=replace(found.probe, config=share_of(found.probe.config, rank)))


def of_environment(
    config: Config,
    inquire: Callable[..., inquiry.Inquiry],
    machines: Callable[[Config, Measurement, int], Iterator[tuple[str, Literal["ok", "bad"], str]]],
) -> Iterator[Finding]:
    """Describe the environment, recommend flags, and with `--ray` examine the machines."""
    try:
        check_name(config.env)
        ranks = config.run.num_learners
        cores = max(1, machine.available_cores() // ranks)
        tunes = is_open(config, config.device, cores)
        ask = partial(inquire, method="spawn")
        is_open_to_all = config.run.algo in STEPS and config.algorithm.needs_actors
        chooses = is_open_to_all and config.sampling.inference != "serial"  # whose plan is known
        timed_cores = cores if tunes or chooses else 0

        def measure(one: Config) -> Measurement:
            asked = partial(inquire, method="forkserver")
            measured = measure_run(one, ask, asked, timed_cores if one.device == "cpu" else 0)
            alone = tunes and ranks == 1 and not config.sampling.ray
            return _of_one_rank(measured.for_slow_steps(one.undecided, cores) if alone else measured, ranks)

        timed = measure(config)
        found = timed if tunes else timed._replace(costs=None)
        yield Finding("env", "ok", f"{shown(config.env.env)}: {_spaces(found.probe.spec)}")
        for note in found.probe.spec.notes:
            if not note.startswith("observation key "):  # examined over more steps below
                yield Finding("env", "note", note)
        yield from report_inputs(found.probe.spec, found.probe.config)
        recommended = recommendation(found, cores)
        # Without actors no process has several environments.
        groups, envs = (recommended.flags.get(name, 0) for name in ("worker_num_splits", "num_envs_per_worker"))
        with ask(send_examination, (config, envs // max(1, groups), groups)) as examination:
            exam = require_answer(examination.answer(config.sampling.reset_timeout_seconds + EXAM_SECONDS))
            several = examination.answer_by(time.monotonic() + config.sampling.reset_timeout_seconds)
        yield from report_examination(cast(Examination, exam), found.probe.spec, found.probe.config.env.horizon)
        yield from report_scales(cast(Examination, exam), found.probe.spec, found.probe.config)
        if chosen := chosen_in(found.probe.config, config.undecided):
            flags = {name: list(value) if isinstance(value, tuple) else value for name, value in chosen.items()}
            yield Finding("settings", "ok", told(found.probe.config, config.undecided, found.probe.spec), flags)
        yield recommended
        if chooses:
            yield Finding("algorithm", "ok", choice(timed, measure, cores, config.to_flat() if ranks > 1 else {}))
        if isinstance(several, WorkerFailed):
            text = f"{envs} in one process, as many as an actor would have: {several.summary}: --num_envs_per_worker=1"
            yield Finding("env", "bad", text)
        if config.sampling.ray:
            yield from (Finding(*one) for one in machines(config, found, cores))
    except Interrupted:
        raise
    except AppoError as error:
        complain(traceback_of(error))
        yield Finding("env", "bad", text_of(error))


def report_examination(exam: Examination, spec: EnvSpec, horizon: int | None = None) -> Iterator[Finding]:
    """Yield findings from the figures of an examined environment, with episodes truncated at `horizon`."""
    if exam.differs_at is None:
        yield Finding("seeding", "ok", f"the same seed and actions gave the same {exam.repeated} steps again")
    else:
        where = f"step {exam.differs_at}" if exam.differs_at else "the first observation"
        yield Finding(
            "seeding", "note", f"the same seed and actions gave something else from {where} on: no exact repeats"
        )
    said = f"; infos hold {', '.join(exam.said)}" if exam.said else ""
    kind = "with the last step of an episode" if spec.same_step else "on the step after the end"
    if exam.episodes:
        yield Finding(
            "episodes",
            "ok",
            f"{exam.episodes} of about {exam.episode_steps:.0f} random steps; a new one begins {kind}{said}",
        )
    elif horizon is not None:
        yield Finding("episodes", "ok", f"none ended in {exam.num_steps} random steps, fewer than --horizon={horizon}")
    else:
        yield Finding(
            "episodes",
            "note",
            f"none ended in {exam.num_steps} random steps; an episode without an end has no return: --horizon=1000"
            " truncates it",
        )
    reset = "" if exam.reset_seconds is None else f"; a reset {in_unit(exam.reset_seconds)}"
    longest = max(exam.longest_seconds, exam.reset_seconds or 0.0)
    usual = f"median {in_unit(exam.median_seconds)}, 99 % below {in_unit(exam.slow_seconds)}"
    yield Finding("step time", "note" if longest > 1.0 else "ok", f"{usual}, longest {in_unit(longest)}{reset}")
    leaks = exam.grown_bytes > LEAK_BYTES or exam.grown_files > LEAK_FILES
    more = f"{_size(max(0, exam.grown_bytes))} and {max(0, exam.grown_files)} open files more"
    hint = ": it leaks, watch the memory of actors" * leaks
    yield Finding("leaks", "note" if leaks else "ok", f"{more} after {exam.grown_steps:,} steps{hint}")


def report_inputs(spec: EnvSpec, config: Config) -> Iterator[Finding]:
    """Yield a finding about large observations that are not read as images."""
    encoders = {} if config.model.encoder_custom else encoder_names(config.model, spec.observations)
    for key, one in spec.observations.items():
        if encoders.get(key) in MLPS and key != MASK_KEY and math.prod(one.shape) > MANY_NUMBERS:
            yield Finding(
                "inputs",
                "note",
                f"{key} {list(one.shape)} is read as {math.prod(one.shape):,} numbers, for which layers are large and"
                " slow: leave out what is not needed; --encoder_type=conv reads three dimensions as an image",
            )


def report_scales(exam: Examination, spec: EnvSpec, config: Config) -> Iterator[Finding]:
    """Yield findings about the sizes of observations, actions and rewards, with helpful flags."""
    for line in exam.lost:
        yield Finding("observations", "bad", line)
    bytes_of = {key: one.high for key, one in spec.observations.items() if one.dtype == "uint8"}
    for key, high in bytes_of.items():
        if key in exam.shown and exam.shown[key][1] > high:
            text = f"{key} reaches {exam.shown[key][1]:g}, but networks divide by the upper bound of its Box, {high}"
            yield Finding("observations", "note", f"{text}: correct the bound")
    floats = {key: ends for key, ends in exam.shown.items() if key not in bytes_of}
    if floats and not exam.lost:
        yield _observations(floats, config)
    if any(spec.action.is_real):
        yield _actions(spec.action, config)
    if config.algorithm.learns_from_rewards:
        yield _rewards(exam, config)


def _observations(shown: Mapping[str, tuple[float, float]], config: Config) -> Finding:
    model = config.model
    ranges = ", ".join(f"{key} from {low:.3g} to {high:.3g}" for key, (low, high) in shown.items())
    if model.normalize_input:
        return Finding("observations", "ok", f"{ranges}; normalized")
    for key, ends in shown.items():
        mean, scale = (model.obs_subtract_mean, model.obs_scale or 1.0) if key == SINGLE_KEY else (0.0, 1.0)
        size = max(abs(end - mean) / scale for end in ends)
        if size > LARGE_NUMBER or 0 < size < SMALL_NUMBER:
            text = f"{ranges}: networks learn from numbers near 1: --normalize_input=True"
            return Finding("observations", "note", text, {"normalize_input": True})
    return Finding("observations", "ok", f"{ranges}; as they are")


def _actions(action: ActionSpec, config: Config) -> Finding:
    """Check whether the first actions of a policy fit into the bounds of the actions."""
    stddev, count = config.model.initial_stddev, len(action.low or ())
    squashed = [number for number, is_real in zip(action.is_squashed, action.is_real, strict=True) if is_real]
    scales, shifts = action.scale or (1.0,) * count, action.shift or (0.0,) * count
    ends = zip(action.low or (), action.high or (), strict=True)
    for (low, high), scale, shift, squashes in zip(ends, scales, shifts, squashed, strict=True):
        mapped = action.scale is not None and (squashes or high - low == 2)  # to two bounds
        least, most = (shift - scale, shift + scale) if mapped else (low + shift, high + shift)
        half, center = (most - least) / 2, (most + least) / 2
        begins = f"a number within [{least:.6g}, {most:.6g}]: a policy begins at {shift:.3g} +- {stddev * scale:.3g}"
        if half >= NO_BOUND:
            return Finding("actions", "note", f"{begins}; two bounds tell it where to look, --initial_stddev how far")
        if mapped and scale > WIDEST_MAPPED:
            return Finding("actions", "note", f"{begins}; narrower bounds, or a smaller --initial_stddev, keep it near")
        if not mapped and (abs(center) > FAR * half or not NARROWEST * stddev <= half <= WIDEST * stddev):
            helps = "--action_scaling=auto maps it to the bounds"
            return Finding("actions", "note", f"{begins}; {helps}", {"action_scaling": "auto"})
    return Finding("actions", "ok", f"{count} numbers, {'mapped to their bounds' if action.scale else 'as they are'}")


def _rewards(exam: Examination, config: Config) -> Finding:
    """Check whether a critic can predict returns of rewards of this size."""
    flags = config.table.by_part["learning"]
    if not exam.largest_reward:
        more = "; a larger --exploration_loss_coeff tries more" * ("exploration_loss_coeff" in flags)
        plays = config.algorithm.needs_actors
        text = f"only chance finds one{more}" if plays else "those of datasets count"
        return Finding("rewards", "note" if plays else "ok", f"all 0 in {exam.num_steps} random steps: {text}")
    scale, clip = config.env.reward_scale, config.env.reward_clip or math.inf
    usual, largest = (min(abs(scale) * size, clip) for size in (exam.usual_reward, exam.largest_reward))
    sizes = f"usually of size {usual:.3g}, at most {largest:.3g}"
    if largest > RARE_REWARD * usual:
        limit = float(f"{10 * usual:.1g}")
        text = f"{sizes}: the rare ones hide all others: --reward_clip={limit:g}"
        return Finding("rewards", "note", text, {"reward_clip": limit})
    normalized = any(getattr(config.learning, name, 0) for name in ("normalize_returns", "categorical_critics"))
    early = normalized and not config.algorithm.synchronous  # units follow the first update, not the first iteration
    least, most = (TINY_REWARD, HUGE_REWARD) if early else (SMALL_REWARD, LARGE_REWARD)
    if normalized and least <= largest <= most:
        return Finding("rewards", "ok", f"{sizes}; returns are normalized")
    if least <= largest <= most:
        return Finding("rewards", "ok", f"{sizes}; as they are")
    if "normalize_returns" in flags and not normalized:
        text = f"{sizes}: a critic predicts numbers near 1: --normalize_returns=True"
        return Finding("rewards", "note", text, {"normalize_returns": True})
    factor = float(f"{scale / usual:.1g}")
    text = f"{sizes}: a critic predicts numbers near 1: --reward_scale={factor:g}"
    return Finding("rewards", "note", text, {"reward_scale": factor})


def recommendation(found: Measurement, cores: int) -> Finding:
    """Return the flags of sampling that a start would choose now."""
    if found.costs is None:
        config = found.probe.config
        placement = choose_placement(config, cores, config.device)
        sampling = plan_workers(found.planned, cores, placement, found.probe.spec.num_agents)
        said = "by fixed rules"
    else:
        plan = found.plan(found.planned, cores)
        sampling, said = plan.sampling, report(found.costs, plan, found.probe.spec.num_agents)
    actors = {
        "num_workers": sampling.num_workers,
        "num_envs_per_worker": sampling.num_envs_per_worker,
        "worker_num_splits": sampling.num_splits,
    }
    flags: dict[str, Any] = {
        "inference": sampling.placement,
        **(actors if sampling.num_workers else {}),
        "learner_main_loop_num_cores": sampling.learner_threads,
    }
    return Finding("recommended", "ok", f"{' '.join(f'--{n}={v}' for n, v in flags.items())} ({said})", flags)


def _gpu() -> Finding:
    if obstacle := cuda_obstacle():
        return Finding("gpu", "note" if has_gpu() else "ok", f"{obstacle}; networks run on the CPU")
    try:
        import torch

        properties = torch.cuda.get_device_properties(0)
    except Exception as error:  # drivers and builds without CUDA raise all kinds
        return Finding("gpu", "bad", f"cannot be used: {text_of(error)}; --device=cpu works without it")
    return Finding(
        "gpu", "ok", f"{properties.name}, {_size(properties.total_memory)}, {torch.cuda.device_count()} in all"
    )


def _spaces(spec: EnvSpec) -> str:
    """Return the observations and actions of an environment in words."""
    shows = ", ".join(f"{key} {list(o.shape)} {o.dtype}" for key, o in spec.observations.items())
    takes = ", ".join(f"{part.size} {KINDS[part.kind]}" for part in spec.action.parts)
    agents = f"; {spec.num_agents} agents" if spec.num_agents > 1 else ""
    frames = f"; {spec.frames_per_step} frames per step" if spec.frames_per_step > 1 else ""
    masks = f"; {masks}" if (masks := masks_said(spec)) else ""
    return f"shows {shows}; takes {takes}{masks}{agents}{frames}"


def _size(number: int) -> str:
    exponent = min(3, int(math.log2(number) // 10)) if number > 0 else 0
    return f"{number / 1024**exponent:.{0 if exponent < 2 else 1}f} {('B', 'KiB', 'MiB', 'GiB')[exponent]}"


def try_nothing(pipe: Connection, log_path: Path) -> None:
    """Report the start of the process."""
    enter("probe", log_path)
    pipe.send(True)
