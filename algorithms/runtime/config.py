"""The flags of processes, of the run and of its reports: where and how long to run."""

from dataclasses import dataclass
from pathlib import Path

from appo.utils.flags import flag
from appo.utils.run_folder import RunFolder
from appo.utils.user_modules import keep_out_of

TRUST = (
    "let a run that has no mark of this user use what it names: modules, arguments of environments, paths (see"
    " docs/security.md); it is marked and need not be asked for again"
)
"""Help of `--trust`, a flag of every command that plays or resumes runs."""

WITHOUT_EFFECT = {"train_in_background_thread": "on CUDA the next batch is uploaded while training in any case"}
"""Flags of Sample Factory accepted without effect -> the reason."""

SAMPLE_EFFICIENT, NO_PRESET = "sample_efficient", "none"
"""Values of `--preset`, beside `default`."""

ENDLESS = {"env_steps": 1e10, "samples": 2.0**62, "seconds": 1e10}  # larger limits count as no limit


@dataclass(frozen=True)
class RunConfig:
    """Run."""

    algo: str = flag(
        "APPO",
        "algorithm: APPO, PPO, A3C, APEX, SAC, PQN, BC, MARWIL, or package.module:Class of your own; auto = the one"
        " that was measured to be best in --env, else APPO; --help with it shows its flags",
        fixed_on_resume=True,
    )
    preset: str = flag(
        "default",
        "settings of a known env: default = for a good return in minutes, sample_efficient = for the most return at the"
        " env steps of published figures, which are the budget then; none = every flag has the default of this list,"
        " whatever env and observations are; --no_presets is none",
        choices=("default", SAMPLE_EFFICIENT, NO_PRESET),
        negated=NO_PRESET,
        fixed_on_resume=True,
        aliases=("presets",),
    )
    experiment: str = flag(
        "", "name of the run's folder, an existing one is resumed; empty = a new numbered folder such as CartPole-v1_1"
    )
    restart_behavior: str = flag(
        "resume",
        "what happens to an existing run of that name: resume = it goes on, restart = its folder is renamed and a new"
        " run begins, overwrite = its folder is removed and a new run begins",
        choices=("resume", "restart", "overwrite"),
    )
    init_from: str = flag(
        "",
        "begin a new run with the weights and normalization statistics of another, RUN[:policy][:best] or, of a chosen"
        " checkpoint that is still there, RUN[:policy]:ckpt_ENV_STEPS, where RUN is a name beside the new one or a"
        " path; empty = random weights",
        fixed_on_resume=True,
    )
    init_whole: bool = flag(
        False,
        "take over all that the checkpoint of --init_from holds, as if its run went on from there: optimizer, counts of"
        " env steps, random numbers, averages and time too",
        fixed_on_resume=True,
    )
    experiments_root: str = flag("", "folder inside train_dir that groups several runs; empty = none")
    train_dir: str = flag("./train_dir", "folder of all runs")
    trust: bool = flag(False, TRUST)
    config: str = flag(
        "",
        "JSON, TOML or YAML file of flags, also in sections such as learning; the command line overrules it, it"
        " overrules all else; empty = none; --print_config[=json] prints all flags and where they come from, as TOML"
        " that can be such a file",
    )
    device: str = flag(
        "auto",
        "where the networks run; auto = cuda, if there is one, for images and for a --batch_size of 1024 or more (SAC:"
        " 256), else cpu; gpu is accepted as cuda",
        choices=("auto", "cpu", "cuda"),
        synonyms={"gpu": "cuda"},
    )
    num_learners: int = flag(
        1,
        "learners of one policy (APPO, PPO, APEX, SAC), each with actors and processes of its own; batch_size and all"
        " limits count all of them; started on this machine, or on several by torchrun (docs/clusters.md)",
        minimum=1,
        maximum=1024,
    )
    precision: str = flag(
        "auto",
        "arithmetic of encoders and cores: bf16 (weights, losses and checkpoints stay float32) or fp32; auto = bf16 for"
        " networks of images where the processor or GPU has instructions for it",
        choices=("auto", "bf16", "fp32"),
    )
    seed: int | None = flag(
        None, "seed from which all random numbers derive; none = drawn once and stored", minimum=0, maximum=2**63 - 1
    )
    save_every_sec: int = flag(120, "seconds between checkpoints", minimum=1, needs="deterministic_resume=False")
    save_every_env_steps: int = flag(
        0, "with --deterministic_resume: env steps between checkpoints, which takes the place of seconds", minimum=0
    )
    deterministic_resume: bool = flag(
        False,
        "let every checkpoint be a barrier at which workers and environments begin anew: a run that is killed and goes"
        " on is then, bit by bit, the one that was never interrupted",
    )
    keep_checkpoints: int = flag(3, "newest checkpoints kept per policy", minimum=1)
    save_milestones_sec: int = flag(
        -1, "seconds of training between checkpoints that are kept for ever; -1 or 0 = none", minimum=-1
    )
    save_best_after: int = flag(
        100_000, "env steps of a policy after which its best checkpoint is kept, in best/; -1 = never", minimum=-1
    )
    save_best_metric: str = flag(
        "reward/mean",
        "what the best has most of, over stats_avg episodes: reward, len or stats/<name>, then /mean, /min or /max",
        harmless=True,
        needs="save_best_after>-1",
    )
    save_best_every_sec: float = flag(
        10, "seconds between looks whether there is a new best checkpoint", minimum=0.1, needs="save_best_after>-1"
    )
    train_for_env_steps: int = flag(
        10_000_000_000, "stop when every policy has learned from this many env steps (frames)", minimum=1
    )
    train_for_seconds: float = flag(1e10, "stop after this many seconds of this start", minimum=0)
    train_until_return: float | None = flag(
        None, "stop when the mean return of the last stats_avg episodes reaches this; none = never"
    )

    @property
    def run_directory(self) -> Path:
        """Return the folder of the run: train_dir/experiments_root/experiment."""
        return Path(self.train_dir, self.experiments_root, self.experiment)

    def keep_code_out(self) -> None:
        """Refuse imports of modules in folders of runs, in this process."""
        keep_out_of(Path(self.train_dir), self.run_directory)

    @property
    def folder(self) -> RunFolder:
        """Return the layout of the run's folder."""
        return RunFolder(self.run_directory)

    @property
    def incidents(self) -> Path:
        """Return the folder of incidents, as an absolute path."""
        return self.folder.incidents.absolute()


@dataclass(frozen=True)
class SamplingConfig:
    """Sampling and processes."""

    inference: str = flag(
        "auto",
        "where actions are computed: central = policy worker processes, local = inside each actor, serial = everything"
        " in one process, auto = measured at the start",
        choices=("auto", "central", "local", "serial"),
    )
    auto_tune: bool = flag(
        True,
        "on the CPU, measure at the start, in at most 2 seconds, what decides those of these flags that are 0 or auto;"
        " off = fixed rules",
    )
    num_workers: int = flag(0, "actor processes; 0 = tuned to the machine", minimum=0, needs="actors")
    num_envs_per_worker: int = flag(
        0, "envs of one actor, a multiple of worker_num_splits; 0 = tuned", minimum=0, needs="actors"
    )
    worker_num_splits: int = flag(
        0,
        "groups into which an actor's envs are split, one steps while others wait for actions; 2 = double buffering,"
        " 1 = off, 0 = tuned",
        minimum=0,
        needs="actors",
    )
    policy_workers_per_policy: int = flag(1, "inference processes per policy", minimum=1, needs="central")
    gpu_colocate: bool = flag(
        False,
        "with --inference=central policy workers live in their learner's process: a GPU takes turns between processes,"
        " but not between the streams of one",
        needs="central",
    )
    batch_mode: str = flag(
        "truncate_episodes",
        "what a trajectory is: truncate_episodes = always --rollout steps, an episode goes on in the next one;"
        " complete_episodes = one whole episode, padded with invalid steps to --rollout, which must be above --horizon"
        " (groups of one env, in the Python loop)",
        choices=("truncate_episodes", "complete_episodes"),
        needs="actors",
    )
    num_policies: int = flag(1, "policies trained together", minimum=1, maximum=63, fixed_on_resume=True)
    max_policy_lag: int = flag(
        100,
        "trajectories whose oldest step was acted this many updates ago, or more, are discarded",
        minimum=1,
        needs="fresh",
    )
    min_traj_buffers_per_worker: int = flag(
        2,
        "trajectories that every env of an actor has room for at least; where sampling stops while training, it has"
        " room for what a batch needs",
        minimum=1,
        needs="rounds",
    )
    num_minibatches_to_accumulate: int | None = flag(
        None,
        "minibatches that may wait for the learner before sampling pauses; none = num_batches_per_iteration, -1 = twice"
        " as many, 0 = none may: where a single policy plays, sampling stops while training",
        minimum=-1,
        needs="rounds",
    )
    lockstep: bool = flag(
        False,
        "let actors and learner take turns in a fixed order, so that a run with processes repeats itself bit by bit for"
        " the same seed; slower, as nobody acts while the learner trains",
    )
    decorrelate_experience_max_seconds: float = flag(
        0.0,
        "seconds the last actor sleeps after its first trajectory, earlier ones less; 0 = no sleep, the"
        " first trajectories of different groups start at different lengths instead",
        minimum=0,
        needs="actors",
    )
    set_workers_cpu_affinity: bool = flag(True, "pin actors to CPU cores", needs="actors processes")
    reset_timeout_seconds: float = flag(
        120,
        "seconds making an env or its first reset may take before its process is killed and started again with its"
        " stack in the log; at the start that happens three times, then the run ends with it",
        minimum=0.001,
        needs="processes",
    )
    max_parallel_starts: int = flag(
        0,
        "actors that make and reset their envs at the same time when a run starts, for envs that are heavy to start;"
        " 0 = all of them",
        minimum=0,
        needs="actors processes",
    )
    step_timeout_seconds: float = flag(
        120,
        "seconds one step of all envs of an actor, or a later reset of one of them, may take before its stack is logged"
        " and it is killed",
        minimum=0.1,
        needs="actors processes",
    )
    work_timeout_seconds: float = flag(
        600,
        "the same for what learners and policy workers do at a time, such as training a batch",
        minimum=1,
        needs="processes",
    )
    restart_workers: bool = flag(
        True, "start a process again that has died, failed or hung; off = that ends the run", needs="actors|processes"
    )
    actor_max_growth_mb: int = flag(
        0,
        "MiB by which an actor with what its envs have started may grow before another one takes its place if it goes"
        " on growing, between two trajectories and without counting as a failure: some envs leak; 0 = its share of the"
        " memory that was free when it started",
        minimum=0,
        maximum=2**40,
        needs="actors processes",
    )
    default_niceness: int = flag(
        0,
        "niceness of the learner; policy workers get 2 more, actors 10 more",
        minimum=-20,
        maximum=19,
        needs="processes",
    )
    train_in_background_thread: bool = flag(
        True, f"accepted, without effect: {WITHOUT_EFFECT['train_in_background_thread']}"
    )
    learner_main_loop_num_cores: int = flag(
        0, "torch threads of the learner on CPU; 0 = tuned, 1 where the flags say all about actors", minimum=0
    )
    ray: str = flag(
        "",
        "machines of a Ray cluster play environments too, and send trajectories here (docs/clusters.md): auto or"
        " HOST:PORT = an existing cluster, local:N = N nodes on this machine, which end with the run; empty = none",
        needs="actors processes",
    )
    ray_compression: str = flag(
        "off",
        'how trajectories travel between machines: lz4 = compressed, which needs pip install "appo[lz4]"; off = as they'
        " are",
        choices=("off", "lz4"),
        needs="ray",
    )
    memory_limit_mb: int = flag(
        0,
        "most MiB that slots, weights and the learners' state may take, and with processes what tuning plans for; 0 ="
        " 90 % of what the machine or its cgroup has free, which is the limit in any case",
        minimum=0,
        maximum=2**40,
    )
    actor_worker_gpus: tuple[int, ...] = flag(
        (),
        "indices of the GPUs that actors may see (for rendering), one per actor in turn, separated by commas; empty ="
        " none, except that with --inference=serial an actor sees what its process sees",
        minimum=0,
        needs="actors",
    )
    sampler_only: bool = flag(False, "sample and never train, to measure the throughput of sampling")
    benchmark: bool = flag(
        False,
        "stop after 2 million env steps or 1 million samples of all policies together in this start, and skip the waits"
        " of a normal one",
    )

    @property
    def given_group_size(self) -> int:
        """Return the environments of a group as given by flags; 0 without."""
        return self.num_envs_per_worker // max(1, self.worker_num_splits)

    @property
    def shares_process(self) -> bool:
        """Return whether flags allow several environments in one process."""
        return self.num_envs_per_worker != 1 or (self.inference == "serial" and self.num_workers > 1)


@dataclass(frozen=True)
class LoggingConfig:
    """Reports."""

    stats_avg: int = flag(100, "episodes over which returns and lengths are averaged", minimum=1)
    experiment_summaries_interval: float = flag(
        20, "seconds between records and TensorBoard summaries; in the first five minutes 5 at most", minimum=0.1
    )
    report_interval_seconds: float = flag(5, "seconds between reports on the console", minimum=0.1)
    log_format: str = flag(
        "auto",
        "how the console reports: panel = one that is drawn anew every second, plain = lines, json = a JSON object per"
        " report and message, auto = panel on a terminal of 60 x 12 characters and more, plain elsewhere",
        choices=("auto", "panel", "plain", "json"),
    )
    log_level: str = flag(
        "info",
        "what is logged by main on the console and by workers in logs/: messages of this level and above; debug shows"
        " each environment that begins, warning and error leave out the reports of plain and json too",
        choices=("debug", "info", "warning", "error"),
    )
    max_log_mb: int = flag(
        64,
        "MiB that the log of each process in logs/ may have, but for a moment: of a longer one the beginning and the"
        " newest lines are kept",
        minimum=1,
        maximum=2**40,
    )
    max_metrics_mb: int = flag(
        64,
        "MiB that metrics.jsonl may have; TensorBoard's files of a policy may have a quarter of this: of larger"
        " ones about every second old record is left out, so that the others are even in time",
        minimum=1,
        maximum=2**40,
    )
    max_stats_names: int = flag(
        256,
        "names of statistics of environments that are reported; one line says when there are more, which are left out",
        minimum=1,
        maximum=100_000,
    )
    plot: bool = flag(True, "draw the learning curve into the run's folder at the end, where matplotlib is installed")
    tensorboard: bool = flag(True, "write TensorBoard summaries beside metrics.jsonl")
    eval_every_sec: float = flag(
        0.0,
        "seconds between evaluations of the newest checkpoint by a process of the lowest priority, more where they"
        " would take over 1.5 % of the cores; checkpoints are then at least as frequent; results in eval/; 0 = none",
        minimum=0,
    )
    eval_episodes: int = flag(
        20,
        "episodes of each evaluation with sampled actions, and as many with the most probable ones",
        minimum=2,
        needs="eval_every_sec",
    )
    eval_video_every_min: float = flag(
        0.0,
        "minutes between videos, at least: the first episode of an evaluation with the most probable actions, as mp4 in"
        " eval/videos/, named by policy and env steps; needs the extra [video]; 0 = none",
        minimum=0,
        needs="eval_every_sec",
    )
    eval_seed: int = flag(
        1_000_000,
        "seed of the episodes of evaluations, the same for every checkpoint",
        minimum=0,
        maximum=2**63 - 1,
        needs="eval_every_sec",
    )
    eval_env_kwargs: dict[str, object] = flag(
        {}, "arguments of the environment in evaluations that differ from those of training", needs="eval_every_sec"
    )
    eval_flags: dict[str, object] = flag(
        {},
        "flags of the environment that differ in evaluations, such as horizon=500 env_frameskip=2",
        needs="eval_every_sec",
    )
    track: tuple[str, ...] = flag(
        (),
        "trackers that all figures are sent to, each from a process of its own, separated by commas: wandb (Weights &"
        " Biases), trackio, mlflow; empty = none",
        elements="wandb, trackio or mlflow",
    )
    with_wandb: bool = flag(False, "the same as --track=wandb", harmless=False)
    wandb_project: str = flag("appo", "project at the trackers, experiment at MLflow", needs="track|with_wandb")
    wandb_user: str = flag(
        "", "user or team at Weights & Biases; empty = the default one", needs="track=*wandb*|with_wandb"
    )
    wandb_group: str = flag("", "group of runs at the trackers; empty = experiments_root", needs="track|with_wandb")
    wandb_job_type: str = flag("train", "kind of run at Weights & Biases and MLflow", needs="track|with_wandb")
    wandb_tags: tuple[str, ...] = flag(
        (), "tags at Weights & Biases and MLflow, separated by commas; empty = none", needs="track|with_wandb"
    )
    custom_summaries: str = flag(
        "",
        "function of yours, package.module:function, that adds figures to each record: given the policy and a dict of"
        " its figures, it returns a dict of tag (such as custom/x) and number; empty = none",
    )
    callbacks: tuple[str, ...] = flag(
        (),
        "classes of yours, package.module:Class, derived from appo.Callbacks: told of episodes, trajectories,"
        " reports and figures, some of which they may change (docs/callbacks.md), separated by commas; empty = none",
    )
    verify_reproduction: bool = flag(
        False,
        "debug: with --learning_rate=0 recompute stored behaviour logits and values and report the largest relative"
        " difference",
    )
