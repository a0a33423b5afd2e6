"""All flags of a training run: composed, completed from their sources, and checked."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, cast

from appo.algorithms.appo.config import APPOConfig
from appo.algorithms.datasets.config import InputConfig, RunOutputConfig
from appo.algorithms.models.config import ModelConfig, reads_images, with_own_encoder
from appo.algorithms.population.config import (
    PopulationConfig,
    changed_per_policy,
    check_copies,
    check_population,
    frozen,
    largest_batch_size,
    values_per_policy,
)
from appo.algorithms.run.algorithms import (
    AUTO,
    DEFAULT,
    FlagTable,
    algorithms_with,
    chosen_algorithm,
    find_algorithm,
    find_preset,
    flag_table,
    require_preset,
    written_in,
)
from appo.algorithms.run.folder import LOCATION, check_folders, check_writable, find_source, new_name, saved_flags
from appo.algorithms.run.ranks.check import check_ranks
from appo.algorithms.run.schedules import check_clock, without_horizon
from appo.algorithms.run.trust import LOOKED_AT, TRAINED, Reading
from appo.algorithms.runtime.algorithm import Algorithm
from appo.algorithms.runtime.budget import Budget
from appo.algorithms.runtime.config import NO_PRESET, LoggingConfig, RunConfig, SamplingConfig
from appo.envs.config import EnvConfig
from appo.envs.given import is_again
from appo.utils.command_line import (
    changed_flags,
    format_help,
    negates,
    parse_command_line,
    print_and_exit,
    wants_help,
    word_of,
    words_of,
)
from appo.utils.errors import UsageError
from appo.utils.files import read_mapping
from appo.utils.flags import Flag, flattened
from appo.utils.system.devices import choose_device
from appo.utils.values import TRUE_WORDS, flag_hint, from_plain, shown


@dataclass(frozen=True)
class Config:
    """All flags of a training run. Each component receives only its part.

    Attributes:
        learning: flags of the algorithm, of the class that the algorithm declares.
        undecided: open flags of an environment without a preset; `run/defaults.py` decides them.
        by_kind: flag -> value that the kind of observation implies for an open flag; {} before the environment is
            known, and for environments with a preset other than `none`, which leaves no flag open.
        given: flags on the command line, and flags of the config file that differ from the default.
        unnamed: whether the run got its name here; the number in the name may change when the folder is made.
        trusted: whether the resumed run has the mark of this user, or `--trust` was given.
    """

    run: RunConfig = field(default_factory=RunConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    learning: Any = field(default_factory=APPOConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    population: PopulationConfig = field(default_factory=PopulationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    output: RunOutputConfig = field(default_factory=RunOutputConfig)
    undecided: frozenset[str] = frozenset()
    by_kind: Mapping[str, object] = field(default_factory=dict)
    given: frozenset[str] = field(default=frozenset(), compare=False)
    unnamed: bool = field(default=False, compare=False)
    trusted: bool = field(default=False, compare=False)

    @classmethod
    def from_flat(cls, values: Mapping[str, object]) -> Self:
        """Compose a configuration of flags in one flat mapping, as in JSON; missing flags have their defaults.

        Raises:
            UsageError: an unknown flag, or a value of the wrong type. Flags are not checked against each other.
        """
        table = flag_table(str(values.get("algo", DEFAULT)))
        found = typed(values, "configuration", table)
        parts: dict[str, Any] = {
            part: table.parts[part](**{name: found[name] for name in flags if name in found})
            for part, flags in table.by_part.items()
        }
        return cls(**parts)

    @classmethod
    def from_saved(cls, flags: Mapping[str, object]) -> Self:
        """Compose the configuration of a saved run (UsageError); a younger flag has its value of `before=`."""
        return cls.from_flat({**flag_table(str(flags.get("algo", DEFAULT))).values_before, **flags})

    @property
    def algorithm(self) -> Algorithm:
        """Return the algorithm, which makes all parts that learn."""
        return find_algorithm(self.run.algo).variant(self.learning)

    @property
    def table(self) -> FlagTable:
        """Return the table of all flags of the run."""
        return flag_table(self.run.algo)

    @property
    def differences(self) -> list[dict[str, Any]]:
        """Return the flags that `--per_policy` gives each policy, checked."""
        table = self.table.by_part
        return values_per_policy(self.population, table["learning"] | table["model"], self.sampling.num_policies)

    @property
    def per_policy(self) -> list[dict[str, Any]]:
        """Return the flags of learning that `--per_policy` gives each policy, as keyword arguments."""
        flags = self.table.by_part["learning"]
        return [{name: value for name, value in values.items() if name in flags} for values in self.differences]

    @property
    def reads_images(self) -> bool:
        """Return whether the network reads images; an unknown environment shows images once it is made."""
        shows_images = bool(self.by_kind) and "encoder_mlp_layers" not in self.by_kind
        return shows_images or reads_images(self.model.encoder_type)

    @property
    def device(self) -> str:
        """Return the device of the networks; `auto` takes a GPU, if there is one, unless minibatches are small.

        Batches of 256, 1024 and 4096 observations of a few numbers are trained on 0.8, 1.1 and 4.5 times as fast on an
        H200 as on 16 cores beside it.
        """
        small = not self.reads_images and self.learning.batch_size < self.algorithm.smallest_gpu_batch
        return "cpu" if self.run.device == "auto" and small else choose_device(self.run.device)

    def model_of(self, policy: int) -> ModelConfig:
        """Return the network flags of a policy; a past version has the network of policy 0."""
        flags, differences = self.table.by_part["model"], self.differences
        values = differences[policy if policy < len(differences) else 0]
        return replace(self.model, **{name: value for name, value in values.items() if name in flags})

    def estimates_returns(self, policy: int) -> bool:
        """Return whether a policy has a trained estimate of returns: a critic with a loss."""
        own = dict(enumerate(self.per_policy)).get(policy, {})
        coefficient = own.get("value_loss_coeff", getattr(self.learning, "value_loss_coeff", 1.0))
        return bool(self.algorithm.values) and coefficient != 0

    @property
    def frozen(self) -> frozenset[int]:
        """Return the policies that never learn."""
        return frozen(self.population, self.sampling.num_policies)

    @property
    def largest_batch_size(self) -> int:
        """Return the largest batch of any policy at any time."""
        sizes = [values.get("batch_size", self.learning.batch_size) for values in self.per_policy]
        return largest_batch_size(self.population, sizes, self.learning.rollout)

    @property
    def repeatable(self) -> bool:
        """Return whether measurements and the clock must not influence learning."""
        return self.run.deterministic_resume or self.sampling.lockstep

    @property
    def alone(self) -> bool:
        """Return whether the run has one policy without opponents."""
        return self.sampling.num_policies == 1 and not self.population.self_play

    @property
    def takes_turns(self) -> bool:
        """Return whether actors wait while the learner trains."""
        if not self.algorithm.needs_actors:
            return False
        return self.sampling.lockstep or (self.alone and self.waiting_minibatches == 0)

    @property
    def whole_episodes(self) -> bool:
        """Return whether a trajectory is one whole episode."""
        return self.sampling.batch_mode == "complete_episodes"

    @property
    def waiting_minibatches(self) -> int:
        """Return how many minibatches may wait for the learner, see `--num_minibatches_to_accumulate`."""
        given, batches = self.sampling.num_minibatches_to_accumulate, int(self.learning.num_batches_per_iteration)
        if self.algorithm.synchronous:
            return 0
        return batches if given is None else 2 * batches if given < 0 else given

    def to_flat(self) -> dict[str, object]:
        """Return every flag and its value in one flat mapping for JSON."""
        flat = {
            name: getattr(getattr(self, part), name) for part, flags in self.table.by_part.items() for name in flags
        }
        return {name: list(value) if isinstance(value, tuple) else value for name, value in flat.items()}


FLAGS_BY_PART, FLAGS = flag_table(DEFAULT).by_part, flag_table(DEFAULT).flags
"""The flags of a run that trains with the default algorithm; what differs from one to another is `learning`."""
ACTION_FLAGS = ("action_scaling", "action_distribution", "continuous_as_bins", "clip_actions")
"""Flags that define the meaning of the network's outputs as actions."""
SIMULATION_SECONDS = 10.0
"""Value of `--eval_every_sec` for `--input_evaluation=simulation` without an interval."""


def parse_train(argv: Sequence[str]) -> Config:
    """Return the configuration of a training command line, all sources resolved (see `resolve`)."""
    return resolve(parse_train_flags(argv))[0]


def parse_train_flags(argv: Sequence[str]) -> dict[str, object]:
    """Return the flags on a training command line; `--help` prints the flags for the env and exits."""
    given = _first_words(argv)
    if wants_help(argv):
        algo, env, preset = chosen_algorithm(given), given.get("env", ""), given.get("preset", "default")
        groups = {part.capitalize(): flags for part, flags in flag_table(algo).by_part.items()}
        if env:
            require_preset(env, find_algorithm(algo), preset)
        known = find_preset(env, choose_device("auto"), find_algorithm(algo), preset) or {}
        print_and_exit(format_help("train_appo.py --env=ID [flags]      for example: --env=CartPole-v1", groups, known))
    return parse_command_line(argv, flag_table(algorithm_of(given)).flags)


def _first_words(argv: Sequence[str]) -> dict[str, str]:
    """Return the flags, as words, that decide which other flags there are."""
    words = {name: word_of(argv, name) for name in ("algo", "env", "env_kwargs", *LOCATION)}
    written = word_of(argv, "preset") or word_of(argv, "presets")
    words["preset"] = NO_PRESET if negates(argv, FLAGS["preset"]) else written
    words["trust"] = TRUE_WORDS[0] if "--trust" in argv else words["trust"]
    return {name: word for name, word in words.items() if word}


def flags_on(argv: Sequence[str]) -> dict[str, Flag]:
    """Return the flags of the algorithm that a command line or its config file names (UsageError: no such)."""
    return flag_table(algorithm_of(_first_words(argv))).flags


def algorithm_of(given: Mapping[str, object]) -> str:
    """Return the name of the algorithm: a saved run's, else the given one, else the config file's, `auto` resolved.

    All other flags can be read only when the algorithm is known, so as few flags as possible are read here.

    Args:
        given: flag -> value, converted or as words, of the flags that name algorithm, environment and run.

    Raises:
        UsageError: a saved run would change its algorithm, or a source is damaged.
    """
    if path := given.get("config"):
        with contextlib.suppress(UsageError):  # `resolve` reports the error
            names = ("algo", "env", "env_kwargs", "preset", *LOCATION[1:])
            file = written_in(read_mapping(Path(str(path))), "config")
            file = {name: value for name, value in file.items() if name in names}
            given = {**file, **{name: value for name, value in given.items() if name != "algo" or value}}
    asked, new = _asked_algorithm(given), chosen_algorithm(given)
    where = {name: str(given[name]) for name in ("experiment", "experiments_root", "train_dir") if name in given}
    run = RunConfig(**where)  # type: ignore[arg-type]
    run.keep_code_out()
    if not run.experiment or given.get("restart_behavior", "resume") != "resume":
        return new
    check_folders(run.train_dir, run.experiments_root, run.experiment)
    reading = Reading.of(run.run_directory, trust=str(given.get("trust", False)).lower() in TRUE_WORDS)
    return _agreed_algorithm(asked, reading.permitted(LOOKED_AT, given={"algo"} if asked else ()), run, new)


def _asked_algorithm(flags: Mapping[str, object]) -> str:
    """Return the algorithm that flags name; empty where a saved run decides."""
    asked = str(flags.get("algo") or "")
    return "" if asked == AUTO else asked


def _agreed_algorithm(asked: str, stored: Mapping[str, object], run: RunConfig, new: str) -> str:
    before = str(stored.get("algo", DEFAULT)) if stored else new
    if asked and asked != before:
        raise UsageError(f"run {run.experiment} cannot change algo {before} -> {asked}; give another --experiment")
    return before


def resolve(given: Mapping[str, object]) -> tuple[Config, dict[str, str]]:
    """Complete the flags of the command line: config file, saved run, env preset and default, in this order.

    Args:
        given: flag -> value, converted, of the flags on the command line.

    Returns:
        The checked configuration, and the source of every flag. An unnamed run gets a name, which the start may still
        change. Flags that depend on the kind of observation are undecided: no environment exists yet.

    Raises:
        UsageError: a source is damaged, a saved run would change a fixed flag, or flags contradict each other.
    """
    source = f"--config={shown(path)}" if (path := str(given.get("config") or "")) else "command line"
    content = read_mapping(Path(path)) if path else {}
    written = written_in(content, source)
    if "config" in written:
        wrong = "a config file cannot name another one" if written["config"] else "a run's own file: see --print_config"
        raise UsageError(f"{source}: {wrong}")
    plain = {**written, **given}
    location = typed({name: plain[name] for name in LOCATION if name in plain}, source, flag_table(DEFAULT))
    run = RunConfig(**location)  # type: ignore[arg-type]
    run.keep_code_out()
    check_folders(run.train_dir, run.experiments_root, run.experiment)
    resumes = run.restart_behavior == "resume"
    reading = Reading.of(run.run_directory, trust=run.trust) if resumes and run.experiment else None

    # Judge trust, once.
    asked_algo = _asked_algorithm(plain)
    told = plain.keys() if asked_algo else plain.keys() - {"algo"}  # an empty name leaves the choice to the saved run
    stored = reading.permitted(TRAINED, given=told) if reading else {}

    # Merge.
    algo = _agreed_algorithm(asked_algo, stored, run, chosen_algorithm(plain))
    algorithm, table = find_algorithm(algo), flag_table(algo)
    file = typed(flattened(content, table.by_part, source), source, table)
    resolved = {"algo": algo}
    file, given = ({**flags, **(resolved if flags.get("algo") == AUTO else {})} for flags in (file, given))
    asked = {**file, **given}
    names = (("env", ""), ("preset", "default"))
    env, wanted = (str(asked.get(name) or stored.get(name) or usual) for name, usual in names)
    own = {"device": "cpu"} if algorithm.whole_rollouts else {}
    device = choose_device(str(asked.get("device") or stored.get("device") or own.get("device", "auto")))
    known = find_preset(env, device, algorithm, wanted)
    arguments: Any = asked.get("env_kwargs")
    if arguments and arguments != stored.get("env_kwargs"):  # they add up
        asked["env_kwargs"] = {**cast(Any, (known or {}).get("env_kwargs", {})), **arguments}
    saved = _saved_values(stored, asked, run, table)
    reads = asked.get("input") or saved.get("input")  # whether `input` is enough is checked below
    if not env and algorithm.needs_actors and not reads:
        missing = f"; there is no saved run {shown(str(run.run_directory))}" if run.experiment else ""
        anew = f"; --restart_behavior={run.restart_behavior} begins a new run" if run.experiment and not resumes else ""
        raise UsageError(f"--env is required, for example --env=CartPole-v1{anew or missing}")
    if not saved:
        require_preset(env, algorithm, wanted)
    saved, preset = without_horizon(asked, saved, without_excluded(asked, with_own_encoder(asked, known or {})))
    weights = {} if saved else _inherited(str(asked.get("init_from") or ""), run)
    layers: list[tuple[str, Mapping[str, object]]] = [
        ("command line", {name: asked[name] for name in given}),
        ("config file", {name: asked[name] for name in file}),
        ("saved run", saved),
        (f"--algo={algo}", own),
        ("init_from", weights),
        ("env preset", preset),
    ]
    values, origins = _merged(layers)
    simulates = values.get("input_evaluation") == "simulation" != saved.get("input_evaluation")  # from now on
    if simulates and not values.get("eval_every_sec") and "eval_every_sec" not in given:
        values["eval_every_sec"], origins["eval_every_sec"] = SIMULATION_SECONDS, "--input_evaluation"
    values["experiment"] = run.experiment or new_name(run.run_directory, env or algo)
    config = replace(
        Config.from_flat(values),
        given=frozenset(given) | {name for name, value in asked.items() if value != table.flags[name].default},
        unnamed=not run.experiment,
        trusted=reading is not None and reading.is_trusted,
    )
    if known is None and not saved:
        config = replace(config, undecided=frozenset(table.flags) - frozenset(values))

    # Check.
    check_writable(config.run.run_directory)
    check(config)
    if not env and config.algorithm.find_spec(config.learning, config.env) is None:
        raise UsageError(f"--env is required with --algo={config.run.algo}, for example --env=CartPole-v1")
    if not saved:
        _check_source(config.run)
    return config, {name: origins.get(name, "default") for name in table.flags}


def without_excluded(asked: Mapping[str, object], preset: Mapping[str, object]) -> dict[str, object]:
    """Return a preset without flags that others exclude: a saved replay; GAE, or rates by KL, on what others played."""
    is_unsaved, reads = asked.get("deterministic_resume") or asked.get("num_learners", 1) != 1, asked.get("input")
    by_kl = reads and str(preset.get("lr_schedule")).startswith("kl_adaptive")
    excluded = {"save_replay": is_unsaved, "with_vtrace": reads, "lr_schedule": by_kl}
    return {name: value for name, value in preset.items() if not excluded.get(name)}


def check(config: Config) -> None:
    """Refuse flags that contradict each other (UsageError, with the numbers)."""
    config.algorithm.check(config.learning, None)
    config.output.check()
    config.env.check(writes=bool(config.output.output))
    _check_sampling(config.sampling, config.device)
    waiting = config.sampling.num_minibatches_to_accumulate
    if config.algorithm.synchronous and waiting is not None and waiting > 0:
        flag = f"--num_minibatches_to_accumulate={waiting}"
        raise UsageError(f"{flag}: --algo={config.algorithm.name} is synchronous, nothing waits")
    _check_repeatable(config)
    _check_whole_episodes(config)
    _check_whole_rollouts(config)
    _check_apart(config)
    _check_datasets(config)
    _check_without_actors(config)
    check_ranks(config)
    if config.run.init_whole and not config.alone:
        flag = "--self_play" if config.population.self_play else f"--num_policies={config.sampling.num_policies}"
        raise UsageError(f"--init_whole goes on with one policy, which does not go with {flag}")
    name, _, kind = config.run.save_best_metric.rpartition("/")
    known = name in ("reward", "reward_exploring", "len") or name.startswith("stats/")
    if not known or kind not in ("mean", "min", "max"):
        shape = f"{shown(config.run.save_best_metric)} is not reward, len or stats/<name>, then /mean, /min or /max"
        raise UsageError(f"--save_best_metric={shape}")
    if not config.model.encoder_mlp_layers:
        raise UsageError("--encoder_mlp_layers needs at least one layer")
    if config.run.precision == "bf16" and config.model.encoder_custom:
        raise UsageError("--precision=bf16 is for built-in networks; with --encoder_custom all is computed in float32")
    check_population(config.population, config.sampling.num_policies, config.logging.stats_avg)
    grows = any(flag.mutation == "samples" for flag in config.table.by_part["learning"].values())
    if config.population.with_pbt:
        check_copies(config.differences, config.table.flags)
    if config.population.with_pbt and config.population.pbt_optimize_batch_size and not grows:
        raise UsageError(f"--pbt_optimize_batch_size: --algo={config.algorithm.name} has no batch size that can mutate")
    for values in config.per_policy:
        config.algorithm.check(replace(config.learning, **values), None)
    rates = [values.get("learning_rate", config.learning.learning_rate) for values in config.per_policy]
    if config.logging.verify_reproduction and any(rates):
        raise UsageError(f"--verify_reproduction needs --learning_rate=0, got {words_of(max(rates))}")


def _check_sampling(sampling: SamplingConfig, device: str) -> None:
    envs, splits = sampling.num_envs_per_worker, sampling.worker_num_splits
    if envs and splits and envs % splits:
        raise UsageError(f"--num_envs_per_worker={envs} is not a multiple of --worker_num_splits={splits}")
    if sampling.actor_worker_gpus and sampling.inference == "serial" and device != "cpu":
        raise UsageError(
            f"--actor_worker_gpus={words_of(sampling.actor_worker_gpus)} with --inference=serial: actors and learner"
            " are one process, which has its GPU from CUDA_VISIBLE_DEVICES"
        )


def _check_repeatable(config: Config) -> None:
    """Refuse flags that prevent bit-identical repetition, if repetition is required."""
    run, sampling = config.run, config.sampling
    if run.save_every_env_steps and not run.deterministic_resume:
        raise UsageError("--save_every_env_steps is for --deterministic_resume; --save_every_sec for all other runs")
    if not config.repeatable:
        return
    flag = "--lockstep" if sampling.lockstep else "--deterministic_resume"
    if run.deterministic_resume and not run.save_every_env_steps:
        raise UsageError(
            "--deterministic_resume needs --save_every_env_steps: by time, no checkpoint comes at the same place twice"
        )
    if sampling.inference not in ("auto", "serial") and not sampling.lockstep:
        raise UsageError(f"{flag} with --inference={sampling.inference} needs --lockstep, or --inference=serial")
    if run.deterministic_resume and getattr(config.learning, "save_replay", False):
        raise UsageError(f"{flag}: every part of such a run begins with an empty replay, leave out --save_replay")
    if config.population.self_play:
        raise UsageError(f"{flag} does not go with --self_play: when past versions join is a matter of timing")
    if sampling.num_policies > 1:
        raise UsageError(f"{flag} is for one policy, got --num_policies={sampling.num_policies}")
    if sampling.decorrelate_experience_max_seconds:
        raise UsageError(f"{flag} allows no pauses by the clock: leave out --decorrelate_experience_max_seconds")
    if config.device != "cpu":
        raise UsageError(f"{flag} is exact on the CPU only: add --device=cpu")
    check_clock(config.learning, Budget.of(run, sampling, 1))


def _check_whole_episodes(config: Config) -> None:
    """Refuse whole episodes that would not fit into a slot, or would wait for other environments of the slot."""
    if not config.whole_episodes:
        return
    env, sampling, flag = config.env, config.sampling, "--batch_mode=complete_episodes"
    if env.horizon is None or env.soft_horizon or config.learning.rollout <= env.horizon:
        given = f"--horizon={words_of(env.horizon)} and --rollout={config.learning.rollout}"
        raise UsageError(f"{flag} needs a --rollout above --horizon, after which an env is reset; got {given}")
    if not 0 < sampling.num_envs_per_worker == sampling.worker_num_splits:
        given = f"{sampling.num_envs_per_worker} and {sampling.worker_num_splits}"
        raise UsageError(f"{flag} needs a group per env, as many --num_envs_per_worker as --worker_num_splits: {given}")
    if env.env_vectorization != "python":
        raise UsageError(f"{flag} needs --env_vectorization=python: vectors begin the next episode unasked")


def _check_whole_rollouts(config: Config) -> None:
    """Refuse flags without a meaning for actors that compute with weights of their own."""
    if not config.algorithm.whole_rollouts:
        return
    algo, sampling, population = f"--algo={config.run.algo}", config.sampling, config.population
    if sampling.inference not in ("auto", "local"):
        raise UsageError(f"--inference={sampling.inference}: with {algo} actors act themselves, which is local")
    if sampling.lockstep or config.run.deterministic_resume:
        flag = "--lockstep" if sampling.lockstep else "--deterministic_resume"
        raise UsageError(f"{flag}: {algo} takes what its actors compute as it comes, which no run repeats")
    if sampling.worker_num_splits > 1:
        raise UsageError(f"--worker_num_splits={sampling.worker_num_splits}: with {algo} an actor has one group")
    if not config.alone:
        flag = "--self_play" if population.self_play else f"--num_policies={sampling.num_policies}"
        raise UsageError(f"{flag}: {algo} is for one policy")
    if config.logging.verify_reproduction:
        raise UsageError(f"--verify_reproduction: {algo} says train/reproduction_error of every gradient as it is")
    if config.device != "cpu":
        raise UsageError(f"{algo} computes in its actors, on the CPU only: add --device=cpu")


def _check_apart(config: Config) -> None:
    """Refuse several policies if trajectories go to processes of the algorithm."""
    if not config.alone and (roles := config.algorithm.processes(config.learning, alone=False)):
        flag = "--self_play" if config.sampling.num_policies == 1 else f"--num_policies={config.sampling.num_policies}"
        plural = " and ".join(role.plural for role in roles)
        raise UsageError(f"{flag}: {plural} in processes of their own are for one policy")


def _check_datasets(config: Config) -> None:
    """Refuse datasets alone for some policies only, and bins with datasets, which contain numbers."""
    algorithm, bins = find_algorithm(config.run.algo), config.env.continuous_as_bins
    learning = [replace(config.learning, **values) for values in config.per_policy]
    if any(type(algorithm.variant(one)) is not type(config.algorithm) for one in learning):
        raise UsageError(
            "--per_policy input: either all policies learn from datasets alone, like --input, or none does"
        )
    if bins and any(isinstance(one, InputConfig) and one.mix.datasets for one in learning):
        raise UsageError(f"--continuous_as_bins={bins} does not go with --input: datasets have numbers")


def _check_without_actors(config: Config) -> None:
    """Refuse flags that need an environment, if the algorithm plays none."""
    if config.algorithm.needs_actors:
        return
    asked = {
        "output": bool(config.output.output),
        "train_until_return": config.run.train_until_return is not None,
        "sampler_only": config.sampling.sampler_only,
        "self_play": config.population.self_play,
        "with_pbt": config.population.with_pbt,
        "verify_reproduction": config.logging.verify_reproduction,
    }
    if flags := [f"--{name}" for name, is_asked in asked.items() if is_asked]:
        raise UsageError(f"{flags[0]}: no environment is played with --algo={config.run.algo}, which has no actors")
    if config.logging.eval_every_sec and not config.env.env:
        simulates = getattr(config.learning, "input_evaluation", "") == "simulation"
        flag = "--input_evaluation=simulation" if simulates else f"--eval_every_sec={config.logging.eval_every_sec:g}"
        raise UsageError(f"{flag} plays episodes: it needs --env")


def _check_source(run: RunConfig) -> None:
    """Refuse a new run whose first weights are missing, or would be removed before they are read."""
    if not run.init_from:
        if run.init_whole:
            raise UsageError("--init_whole takes over the checkpoint of --init_from, which is not given")
        return
    source = find_source(run.init_from, run.run_directory.parent)
    if run.run_directory.resolve() in source.checkpoints.resolve().parents:
        taken = f"is the run that --restart_behavior={run.restart_behavior} takes away: give another --experiment"
        raise UsageError(f"--init_from={shown(run.init_from)} {taken}")


def _inherited(init_from: str, run: RunConfig) -> dict[str, object]:
    """Return the flags that say what the weights of another run mean as actions; no other flag of that run counts."""
    if not init_from:
        return {}
    directory, table = find_source(init_from, run.run_directory.parent).run.path, flag_table(DEFAULT)
    stored = table.values_before | saved_flags(directory)
    found = {name: stored.get(name, table.flags[name].default) for name in ACTION_FLAGS}
    return typed(found, f"saved configuration of run {directory.name}", table)


def _saved_values(
    stored: Mapping[str, object], asked: Mapping[str, object], run: RunConfig, table: FlagTable
) -> dict[str, object]:
    """Return the flags of the saved run; refuse changes of fixed flags (UsageError)."""
    if not stored:
        return {}
    values = table.values_before | typed(stored, f"saved configuration of run {run.experiment}", table)
    saved = {name: value for name, value in values.items() if name not in LOCATION}
    fixed = {name: value for name, value in asked.items() if table.flags[name].is_fixed(saved)}
    if is_again(str(saved.get("env", "")), str(fixed.get("env", ""))):
        fixed.pop("env")  # the same class under its present name
    before = {name: table.flags[name].default for name in fixed} | saved  # the flag may be newer than the run
    if changes := [*changed_flags(before, fixed), *changed_per_policy(saved, asked, table.flags)]:
        raise UsageError(f"run {run.experiment} cannot change {', '.join(changes)}; give another --experiment")
    return saved


def typed(values: Mapping[str, object], source: str, table: FlagTable) -> dict[str, object]:
    """Convert plain values by their flags; errors name the source (UsageError)."""
    found: dict[str, object] = {}
    for word, value in values.items():
        if (name := table.aliases.get(word, word)) not in table.flags:
            hint = flag_hint(word, table.flags, algorithms_with, dashes="")
            raise UsageError(f"{source}: unknown flag {shown(word)}{hint}")
        try:
            found[name] = from_plain(table.flags[name], value)
        except UsageError as error:
            raise UsageError(f"{source}: {error}") from None
    return found


def _merged(layers: Sequence[tuple[str, Mapping[str, object]]]) -> tuple[dict[str, object], dict[str, str]]:
    """Return the value and the source of every flag; earlier layers win."""
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    for origin, layer in reversed(layers):
        values.update(layer)
        origins.update(dict.fromkeys(layer, origin))
    return values, origins
