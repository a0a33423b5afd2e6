"""All flags of a training run: they are composed, completed from their sources and checked here."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from appo.algorithms.appo.config import APPOConfig
from appo.algorithms.datasets.config import InputConfig, RunOutputConfig
from appo.algorithms.models.config import ModelConfig
from appo.algorithms.population.config import (
    PopulationConfig,
    check_population,
    frozen,
    largest_batch_size,
    values_per_policy,
)
from appo.algorithms.run.algorithms import DEFAULT, FlagTable, algorithms_with, find_algorithm, find_preset, flag_table
from appo.algorithms.run.folder import check_folders, check_writable, find_source, new_name, saved_flags
from appo.algorithms.run.trust import LOOKED_AT, TRAINED, Reading
from appo.algorithms.runtime.algorithm import Algorithm
from appo.algorithms.runtime.config import LoggingConfig, RunConfig, SamplingConfig
from appo.envs.config import EnvConfig
from appo.envs.given import is_again
from appo.utils.command_line import format_help, parse_command_line, print_and_exit, underscored, wants_help, words_of
from appo.utils.errors import UsageError
from appo.utils.files import read_mapping
from appo.utils.flags import flattened
from appo.utils.system.devices import choose_device
from appo.utils.values import TRUE_WORDS, flag_hint, from_plain, shown


@dataclass(frozen=True)
class Config:
    """All flags of a training run; every component receives its part, never the whole.

    Attributes:
        learning: flags of the algorithm, of the class that it declares.
        undecided: flags that nobody has given, of an environment without a preset: `run/defaults.py` decides them.
        by_kind: flag -> value that it decides for such an environment where nothing is given; {} before that and for
            all others.
        given: flags on the command line, and of the config file those that are not as without it by default.
        unnamed: whether nobody has named the run: the number in its name may be another one when its folder is made.
        trusted: whether the saved run that goes on was marked by this user, or is trusted by `--trust`, when its flags
            were read.
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
        """Compose a configuration of flags in one flat mapping, as JSON holds it; what is missing has its default.

        Raises:
            UsageError: an unknown flag, or a value that is not the flag's. Flags are not checked against each other.
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
        """Compose the configuration of a saved run; flags that its version did not have are as they were then.

        Raises:
            UsageError: as `from_flat`.
        """
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

    def model_of(self, policy: int) -> ModelConfig:
        """Return the flags of the network of a policy; a past version has that of the first one."""
        flags, differences = self.table.by_part["model"], self.differences
        values = differences[policy if policy < len(differences) else 0]
        return replace(self.model, **{name: value for name, value in values.items() if name in flags})

    def estimates_returns(self, policy: int) -> bool:
        """Return whether a policy has a trained estimate of returns: a critic that no loss has reached has none."""
        own = dict(enumerate(self.per_policy)).get(policy, {})
        coefficient = own.get("value_loss_coeff", getattr(self.learning, "value_loss_coeff", 1.0))
        return bool(self.algorithm.values) and coefficient != 0

    @property
    def frozen(self) -> frozenset[int]:
        """Return the policies that never learn."""
        return frozen(self.population, self.sampling.num_policies)

    @property
    def largest_batch_size(self) -> int:
        """Return the largest batch of any policy, at any time."""
        sizes = [values.get("batch_size", self.learning.batch_size) for values in self.per_policy]
        return largest_batch_size(self.population, sizes, self.learning.rollout)

    @property
    def repeatable(self) -> bool:
        """Return whether nothing that is measured or timed may decide what is learned."""
        return self.run.deterministic_resume or self.sampling.lockstep

    @property
    def takes_turns(self) -> bool:
        """Return whether actors wait while the learner trains."""
        if not self.algorithm.needs_actors:
            return False
        single = self.sampling.num_policies == 1 and not self.population.self_play
        return self.sampling.lockstep or (single and self.waiting_minibatches == 0)

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
        """Return every flag and its value in one flat mapping that JSON can hold."""
        flat = {
            name: getattr(getattr(self, part), name) for part, flags in self.table.by_part.items() for name in flags
        }
        return {name: list(value) if isinstance(value, tuple) else value for name, value in flat.items()}


FLAGS_BY_PART, FLAGS = flag_table(DEFAULT).by_part, flag_table(DEFAULT).flags
"""The flags of a run that trains with the default algorithm; what differs from one to another is `learning`."""

LOCATION = ("config", "experiment", "experiments_root", "train_dir", "restart_behavior", "trust")
"""Flags that a saved run does not decide: they say where it is, as its folder may have been moved, and what of it."""

ACTION_FLAGS = ("action_scaling", "action_distribution", "continuous_as_bins")
"""Flags that say what the outputs of a network mean as actions."""
SIMULATION_SECONDS = 10.0
"""Value of `--eval_every_sec` where `--input_evaluation=simulation` asks for evaluations and nothing says how often."""

TRAIN_USAGE = "train_appo.py --env=ID [flags]      for example: train_appo.py --env=CartPole-v1"


def parse_train(argv: Sequence[str]) -> Config:
    """Return the configuration of a training command line, all sources resolved (see `resolve`)."""
    return resolve(parse_train_flags(argv))[0]


def parse_train_flags(argv: Sequence[str]) -> dict[str, object]:
    """Return the flags given on a training command line; `--help` prints the flags of this env and exits."""
    words = {name: word_of(argv, name) for name in ("algo", "env", *LOCATION)}
    given = {name: word for name, word in words.items() if word}
    if "--trust" in argv:
        given["trust"] = TRUE_WORDS[0]
    if wants_help(argv):
        algo = given.get("algo", DEFAULT)
        groups = {part.capitalize(): flags for part, flags in flag_table(algo).by_part.items()}
        known = find_preset(given.get("env", ""), choose_device("auto"), find_algorithm(algo))
        print_and_exit(format_help(TRAIN_USAGE, groups, known or {}))
    return parse_command_line(argv, flag_table(algorithm_of(given)).flags)


def algorithm_of(given: Mapping[str, object]) -> str:
    """Return the name of the algorithm: a saved run's wins, then the one that is given, then the config file's.

    The other flags can be read only when it is known, so this looks at as few as can be.

    Args:
        given: flag -> value, converted or as words, of the flags that say what is trained and where.

    Raises:
        UsageError: a saved run would change its algorithm, or a source is damaged.
    """
    asked, contents = str(given.get("algo", "")), dict[str, object]()
    if not asked and (path := given.get("config")):
        with contextlib.suppress(UsageError):  # said when all of it is read
            contents = read_mapping(Path(str(path)))
        part = contents.get("run")
        asked = str(contents.get("algo") or (part.get("algo") if isinstance(part, Mapping) else None) or "")
    where = {name: str(given[name]) for name in ("experiment", "experiments_root", "train_dir") if name in given}
    run = RunConfig(**where)  # type: ignore[arg-type]
    run.keep_code_out()
    if not run.experiment or given.get("restart_behavior", "resume") != "resume":
        return asked or DEFAULT
    check_folders(run.train_dir, run.experiments_root, run.experiment)
    trust = str(given.get("trust", False)).lower() in TRUE_WORDS
    told = {"algo"} if asked else set()
    saved = Reading.of(run.run_directory, trust=trust).permitted(LOOKED_AT, given=told)
    before = str(saved.get("algo", DEFAULT)) if saved else asked or DEFAULT
    if asked and asked != before:
        raise UsageError(f"run {run.experiment} cannot change algo {before} -> {asked}; give another --experiment")
    return before


def resolve(given: Mapping[str, object]) -> tuple[Config, dict[str, str]]:
    """Complete the flags of the command line: config file, saved run, env preset and default, in this order.

    Args:
        given: flag -> value, converted, of the flags on the command line.

    Returns:
        The checked configuration, and for every flag the source it came from. An unnamed run gets a name here, of
        which the start makes sure that it is its own. What the kind of observation decides is still undecided: the
        environment has not been made.

    Raises:
        UsageError: a source is damaged, a saved run would change what it cannot, or flags contradict each other.
    """
    table = flag_table(algo := algorithm_of(given))
    layers: list[tuple[str, Mapping[str, object]]] = [("command line", given)]
    if path := given.get("config"):
        layers.append(("config file", _config_file(str(path), table)))
    asked, _ = _merged(layers)
    chosen = given.keys() | {name for name, value in asked.items() if value != table.flags[name].default}
    run = RunConfig(**{name: asked[name] for name in LOCATION if name in asked})  # type: ignore[arg-type]
    check_folders(run.train_dir, run.experiments_root, run.experiment)
    resumes = run.restart_behavior == "resume"
    reading = Reading.of(run.run_directory, trust=run.trust) if resumes and run.experiment else None
    saved = _saved_run(run, reading, asked, table) if reading else {}
    env = str(asked.get("env") or saved.get("env", ""))
    reads = asked.get("input") or saved.get("input")  # what that is shows when all flags are known
    if not env and find_algorithm(algo).needs_actors and not reads:
        missing = f"; there is no saved run {shown(str(run.run_directory))}" if run.experiment else ""
        anew = f"; --restart_behavior={run.restart_behavior} begins a new run" if run.experiment and not resumes else ""
        raise UsageError(f"--env is required, for example --env=CartPole-v1{anew or missing}")
    layers += [
        ("saved run", saved),
        (f"--algo={algo}", {"device": "cpu"} if find_algorithm(algo).whole_rollouts else {}),
    ]
    device = choose_device(str(_merged(layers)[0].get("device", "auto")))
    known = find_preset(env, device, find_algorithm(algo))
    source = {} if saved else _inherited(str(asked.get("init_from") or ""), run)
    layers += [("init_from", source), ("env preset", known or {})]
    if _merged(layers)[0].get("input_evaluation") == "simulation":
        layers.append(("--input_evaluation", {"eval_every_sec": SIMULATION_SECONDS}))
    values, origins = _merged(layers)
    values["experiment"] = run.experiment or new_name(run.run_directory, env or algo)
    trusted = reading is not None and reading.is_trusted
    config = replace(Config.from_flat(values), given=frozenset(chosen), unnamed=not run.experiment, trusted=trusted)
    if known is None and not saved:
        config = replace(config, undecided=frozenset(table.flags) - frozenset(values))
    check_writable(config.run.run_directory)
    check(config)
    if not env and config.algorithm.find_spec(config.learning, config.env) is None:
        raise UsageError(f"--env is required with --algo={config.run.algo}, for example --env=CartPole-v1")
    if not saved:
        _check_source(config.run)
    return config, {name: origins.get(name, "default") for name in table.flags}


def changed_flags(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Return `flag old -> new` for every flag of both mappings (as `Config.to_flat`) whose value differs."""
    pairs = {name: (before[name], after[name]) for name in after if name in before and before[name] != after[name]}
    return [f"{name} {words_of(old)} -> {words_of(new)}" for name, (old, new) in pairs.items()]


def check(config: Config) -> None:
    """Refuse flags that are right alone and wrong together (UsageError, with the numbers)."""
    config.algorithm.check(config.learning, None)
    config.output.check()
    _check_env(config.env)
    _check_sampling(config.sampling, config.run.device)
    waiting = config.sampling.num_minibatches_to_accumulate
    if config.algorithm.synchronous and waiting is not None and waiting > 0:
        raise UsageError(
            f"--num_minibatches_to_accumulate={waiting}: --algo={config.algorithm.name} is synchronous, nothing waits"
        )
    _check_repeatable(config)
    _check_whole_episodes(config)
    _check_whole_rollouts(config)
    _check_apart(config)
    _check_datasets(config)
    _check_without_actors(config)
    if config.run.init_whole and (config.sampling.num_policies > 1 or config.population.self_play):
        flag = "--self_play" if config.population.self_play else f"--num_policies={config.sampling.num_policies}"
        raise UsageError(f"--init_whole goes on with one policy, which does not go with {flag}")
    name, _, kind = config.run.save_best_metric.rpartition("/")
    if not name or kind not in ("mean", "min", "max"):
        shape = "reward, len or stats/<name>, then /mean, /min or /max"
        raise UsageError(f"--save_best_metric={shown(config.run.save_best_metric)} is not {shape}")
    if not config.model.encoder_mlp_layers:
        raise UsageError("--encoder_mlp_layers needs at least one layer")
    if config.run.precision == "bf16" and config.model.encoder_custom:
        raise UsageError("--precision=bf16 is for built-in networks; with --encoder_custom all is computed in float32")
    check_population(config.population, config.sampling.num_policies)
    grows = any(flag.mutation == "samples" for flag in config.table.by_part["learning"].values())
    if config.population.with_pbt and any(config.model_of(p) != config.model for p in range(len(config.differences))):
        raise UsageError("--with_pbt: policies copy each other's weights, so --per_policy gives them no other networks")
    if config.population.with_pbt and config.population.pbt_optimize_batch_size and not grows:
        raise UsageError(f"--pbt_optimize_batch_size: --algo={config.algorithm.name} has no batch size that can mutate")
    for values in config.per_policy:
        config.algorithm.check(replace(config.learning, **values), None)
    rates = [values.get("learning_rate", config.learning.learning_rate) for values in config.per_policy]
    if config.logging.verify_reproduction and any(rates):
        rate = words_of(max(rates))
        raise UsageError(f"--verify_reproduction needs --learning_rate=0, got {rate}")


def _check_env(env: EnvConfig) -> None:
    if env.soft_horizon and env.horizon is None:
        raise UsageError("--soft_horizon needs --horizon, the steps after which an episode ends in the statistics")
    if env.action_distribution == "tanh_gaussian" and env.action_scaling == "off":
        raise UsageError(
            "--action_distribution=tanh_gaussian fills [-1, 1] and no more: it needs --action_scaling=auto, which maps"
            " that to the bounds"
        )
    if env.continuous_as_bins and (env.action_distribution == "tanh_gaussian" or not env.clip_actions):
        other = "--clip_actions=False" if not env.clip_actions else "--action_distribution=tanh_gaussian"
        raise UsageError(
            f"--continuous_as_bins={env.continuous_as_bins} has choices from bound to bound: without {other}"
        )


def _check_sampling(sampling: SamplingConfig, device: str) -> None:
    envs, splits = sampling.num_envs_per_worker, sampling.worker_num_splits
    if envs and splits and envs % splits:
        raise UsageError(f"--num_envs_per_worker={envs} is not a multiple of --worker_num_splits={splits}")
    if sampling.actor_worker_gpus and sampling.inference == "serial" and choose_device(device) != "cpu":
        raise UsageError(
            f"--actor_worker_gpus={words_of(sampling.actor_worker_gpus)} with --inference=serial: actors and learner"
            " are one process, which has its GPU from CUDA_VISIBLE_DEVICES"
        )


def _check_repeatable(config: Config) -> None:
    """Refuse flags that keep a run from repeating itself bit by bit, if it is asked to."""
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
    if choose_device(run.device) != "cpu":
        raise UsageError(f"{flag} is exact on the CPU only: add --device=cpu")


def _check_whole_episodes(config: Config) -> None:
    """Refuse whole episodes that would not fit into a slot, or would have to wait for others in it."""
    if not config.whole_episodes:
        return
    env, sampling, flag = config.env, config.sampling, "--batch_mode=complete_episodes"
    if env.horizon is None or env.soft_horizon or config.learning.rollout <= env.horizon:
        given = f"--horizon={words_of(env.horizon)} and --rollout={config.learning.rollout}"
        raise UsageError(f"{flag} needs a --rollout above --horizon, after which an env is reset; got {given}")
    if not 0 < sampling.num_envs_per_worker == sampling.worker_num_splits:
        given = f"{sampling.num_envs_per_worker} and {sampling.worker_num_splits}"
        raise UsageError(
            f"{flag} needs a group per env, as many --num_envs_per_worker as --worker_num_splits; got {given}"
        )
    if env.env_vectorization != "python":
        raise UsageError(f"{flag} needs --env_vectorization=python: vectors begin the next episode unasked")


def _check_whole_rollouts(config: Config) -> None:
    """Refuse flags without a meaning where each actor acts and computes with weights of its own."""
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
    if sampling.num_policies > 1 or population.self_play:
        flag = "--self_play" if population.self_play else f"--num_policies={sampling.num_policies}"
        raise UsageError(f"{flag}: {algo} is for one policy")
    if config.logging.verify_reproduction:
        raise UsageError(f"--verify_reproduction: {algo} says train/reproduction_error of every gradient as it is")
    if choose_device(config.run.device) != "cpu":
        raise UsageError(f"{algo} computes in its actors, on the CPU only: add --device=cpu")


def _check_apart(config: Config) -> None:
    """Refuse several policies where what is played goes to processes of the algorithm's own."""
    if roles := config.algorithm.processes(config.learning):
        several = config.sampling.num_policies > 1
        if several or config.population.self_play:
            flag = f"--num_policies={config.sampling.num_policies}" if several else "--self_play"
            plural = " and ".join(role.plural for role in roles)
            raise UsageError(f"{flag}: {plural} in processes of their own are for one policy")


def _check_datasets(config: Config) -> None:
    """Refuse bins where a dataset is read, alone or beside actors: no number of its actions is the choice of a bin."""
    learning = [replace(config.learning, **values) for values in config.per_policy]
    if config.env.continuous_as_bins and any(isinstance(one, InputConfig) and one.mix.datasets for one in learning):
        raise UsageError(
            f"--continuous_as_bins={config.env.continuous_as_bins} does not go with --input: datasets have numbers"
        )


def _check_without_actors(config: Config) -> None:
    """Refuse flags that need an environment to play in, if the algorithm plays in none."""
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
    """Refuse a new run whose first weights are nowhere, or would be taken away before they are read."""
    if not run.init_from:
        if run.init_whole:
            raise UsageError("--init_whole takes over the checkpoint of --init_from, which is not given")
        return
    source = find_source(run.init_from, run.run_directory.parent)
    if run.run_directory.resolve() in source.checkpoints.resolve().parents:
        raise UsageError(
            f"--init_from={shown(run.init_from)} is the run that --restart_behavior={run.restart_behavior} takes away:"
            " give another --experiment"
        )


def _inherited(init_from: str, run: RunConfig) -> dict[str, object]:
    """Return the flags without which weights of another run mean something else: those of its actions."""
    if not init_from:
        return {}
    directory = find_source(init_from, run.run_directory.parent).run.path
    stored, table = saved_flags(directory), flag_table(DEFAULT)  # of a stranger's run nothing else may decide anything
    before = {name: table.values_before.get(name, table.flags[name].default) for name in ACTION_FLAGS}
    found = {name: stored.get(name, value) for name, value in before.items()}
    return typed(found, f"saved configuration of run {directory.name}", table)


def _config_file(path: str, table: FlagTable) -> dict[str, object]:
    source = f"--config={shown(path)}"
    values = typed(flattened(read_mapping(Path(path)), table.by_part, source), source, table)
    if "config" in values:
        raise UsageError(f"--config={shown(path)}: a config file cannot name another one")
    return values


def _saved_run(run: RunConfig, reading: Reading, asked: Mapping[str, object], table: FlagTable) -> dict[str, object]:
    """Return the flags of the run that is to be resumed, nothing for a new one; refuse changes it cannot take."""
    own = reading.permitted(TRAINED, given=asked.keys())
    stored = typed(own, f"saved configuration of run {run.experiment}", table)
    if not stored:
        return {}
    saved = {name: value for name, value in (table.values_before | stored).items() if name not in LOCATION}
    fixed = {name: value for name, value in asked.items() if table.flags[name].fixed_on_resume}
    if is_again(str(saved.get("env", "")), str(fixed.get("env", ""))):
        fixed.pop("env")  # the same class, which has a place of its own by now
    before = {name: table.flags[name].default for name in fixed} | saved  # an older version may not have had the flag
    if changes := changed_flags(before, fixed):
        raise UsageError(f"run {run.experiment} cannot change {', '.join(changes)}; give another --experiment")
    return saved


def typed(values: Mapping[str, object], source: str, table: FlagTable) -> dict[str, object]:
    """Convert plain values by their flags; errors name the source (UsageError)."""
    found: dict[str, object] = {}
    for word, value in values.items():
        name = table.aliases.get(word, word)
        if name not in table.flags:
            hint = flag_hint(word, table.flags, algorithms_with, dashes="")
            raise UsageError(f"{source}: unknown flag {shown(word)}{hint}")
        try:
            found[name] = from_plain(table.flags[name], value)
        except UsageError as error:
            raise UsageError(f"{source}: {error}") from None
    return found


def _merged(layers: Sequence[tuple[str, Mapping[str, object]]]) -> tuple[dict[str, object], dict[str, str]]:
    """Return the value of every flag and the layer it comes from; earlier layers win."""
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    for origin, layer in reversed(layers):
        values.update(layer)
        origins.update(dict.fromkeys(layer, origin))
    return values, origins


def word_of(argv: Sequence[str], name: str) -> str:
    """Return the value of a flag on a command line that need not be right otherwise."""
    flag, found = f"--{name}", ""
    argv = underscored(argv)
    for word, following in zip(argv, [*argv[1:], ""], strict=False):
        if word == flag:
            found = following
        elif word.startswith(f"{flag}="):
            found = word.removeprefix(f"{flag}=")
    return found
