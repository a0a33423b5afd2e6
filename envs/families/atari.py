"""Atari is preprocessed as by Mnih et al. 2015 (https://www.nature.com/articles/nature14236), by ale-py itself.

Training steps ale-py's vector environment, written in C++; watching needs single environments that can be rendered,
and gymnasium's wrappers show what the vector shows. Frames are skipped, gray, 84x84 and stacked by four; rewards stay
raw here (a preset clips them to their sign for training); a lost life ends nothing here.
"""

from typing import Any

from appo.envs.config import EnvConfig
from appo.envs.family import MANY_STEPS, PIXELS, AnyEnv, Family, FamilyPreset, Registration, importing
from appo.utils.errors import UsageError

NAMES = (
    r"adventure|airraid|alien|amidar|assault|asterix|asteroids|atlantis2?|backgammon|bankheist|basicmath|battlezone|"
    r"beamrider|berzerk|blackjack|bowling|boxing|breakout|carnival|casino|centipede|choppercommand|crazyclimber|"
    r"crossbow|darkchambers|defender|demonattack|donkeykong|doubledunk|earthworld|elevatoraction|enduro|entombed|et|"
    r"fishingderby|flagcapture|freeway|frogger|frostbite|galaxian|gopher|gravitar|hangman|hauntedhouse|hero|"
    r"humancannonball|icehockey|jamesbond|journeyescape|kaboom|kangaroo|keystonekapers|kingkong|klax|koolaid|krull|"
    r"kungfumaster|lasergates|lostluggage|mariobros|miniaturegolf|montezumarevenge|mrdo|mspacman|namethisgame|othello|"
    r"pacman|phoenix|pitfall2?|pong|pooyan|privateeye|qbert|riverraid|roadrunner|robotank|seaquest|sirlancelot|skiing|"
    r"solaris|spaceinvaders|spacewar|stargunner|superman|surround|tennis|tetris|tictactoe3d|timepilot|trondead|turmoil|"
    r"tutankham|upndown|venture|videocheckers|videochess|videocube|videopinball|wizardofwor|wordzapper|yarsrevenge|"
    r"zaxxon"
)
# Of versions without a prefix; other packages use the words too.
OLD_IDS = rf"(?i:{NAMES})(NoFrameskip|Deterministic)-v\d"

FAMILY = Family(
    "Atari",
    package="ale_py",
    extra="atari",
    examples=("ALE/Pong-v5", "PongNoFrameskip-v4"),
    treatment="ale-py's C++ vector environment: every 4th frame, gray, 84x84, 4 stacked. Sticky actions as registered"
    " (0.25, unless `--env_kwargs repeat_action_probability=0`). A lost life ends an episode only in learning with"
    " `--episodic_life`; `--env_kwargs use_fire_reset=True` presses FIRE at the start of a game. Training uses the sign"
    " of the reward, reports the raw reward",
    ids=rf"ALE/|{OLD_IDS}",
    prefixes=("ALE/",),
    names=NAMES,
    entry_points=r"ale_py\.",
    register=importing("ale_py"),
    harmless={
        **dict.fromkeys(
            (
                "repeat_action_probability", "full_action_space", "continuous", "continuous_action_threshold",
                "grayscale", "maxpool", "episodic_life", "life_loss_info", "reward_clipping", "use_fire_reset",
            ),
            1.0,
        ),
        **dict.fromkeys(("frameskip", "stack_num", "num_threads"), 64.0),
        **dict.fromkeys(("mode", "difficulty"), 255.0),
        **dict.fromkeys(("img_height", "img_width"), PIXELS),
        "noop_max": 1000,
        "max_num_frames_per_episode": MANY_STEPS,
        "obs_type": r"rgb|grayscale|ram",
        "autoreset_mode": r"NextStep|SameStep",
    },
    preset=FamilyPreset(
        ids=rf"ALE/|{OLD_IDS}|envpool:\w+-v5$",
        # The Nature network.
        network={
            "encoder_type": "conv",
            "encoder_subtype": "convnet_atari",
            "nonlinearity": "relu",
            "policy_init_gain": 1.414,
            "use_rnn": False,
            "normalize_images": True,
            "reward_clip": 1.0,
        },
        # On two cores the Nature network has hardly begun with Pong after ten minutes; this network is a third of the
        # work. A step of the game then costs more than training on the step, and two passes pay.
        network_on_cpu={"encoder_subtype": "convnet_dqn", "hidden_size": 256},
        learning_on_cpu={"ppo_epochs": 2},
        # Minibatches of 256 as in Schulman et al. 2017, table 5 (arXiv:1707.06347); one pass over fresher data and a
        # larger step learn more per second here than the paper's four passes.
        learning={
            "rollout": 32,
            "batch_size": 256,
            "num_batches_per_iteration": 4,
            "learning_rate": 5e-4,
            "vtrace_lambda": 0.95,
            "adam_eps": 1e-5,
            "max_grad_norm": 0.5,
            "exploration_loss_coeff": 0.01,
        },
    ),
)  # fmt: skip

FRAME_SKIP = 4
FRAME_STACK = 4
MAX_FRAMES = 108_000  # half an hour of play, as the environments are registered

# What a person may set by --env_kwargs and how the wrapper calls it; everything else goes to the emulator.
PREPROCESSING = {"noop_max": "noop_max", "episodic_life": "terminal_on_life_loss", "grayscale": "grayscale_obs"}
SIZES = ("img_height", "img_width")


def vector_arguments(config: EnvConfig, registration: Registration) -> dict[str, Any]:
    """Return arguments of `ale_py.vector_env.AtariVectorEnv`; one thread, because every core has an actor."""
    defaults = {"num_threads": 1, "reward_clipping": False, "use_fire_reset": False}
    names = ("frameskip", "stack_num", "max_num_frames_per_episode")
    ours = dict(zip(names, _frames(config, registration), strict=True))
    return {name: value for name, value in defaults.items() if name not in config.env_kwargs} | ours


def make_single(registration: Registration, config: EnvConfig, arguments: dict[str, Any]) -> AnyEnv:
    """Make one game behind gymnasium's wrappers (UsageError: an argument is known to the vector environment only)."""
    from gymnasium import ObservationWrapper
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

    from appo.envs.spaces import layers
    from appo.envs.wrappers.fire_reset import FireReset
    from appo.envs.wrappers.making import make_registered

    arguments = dict(arguments)
    preprocessing = {ours: arguments.pop(name) for name, ours in PREPROCESSING.items() if name in arguments}
    height, width = (arguments.pop(name, 84) for name in SIZES)
    for name in ("stack_num", "num_threads", "thread_affinity_offset"):  # taken below, or of no meaning for one game
        arguments.pop(name, None)
    presses_fire = arguments.pop("use_fire_reset", False)
    if arguments.pop("reward_clipping", False):
        why = "only ale-py's vector environment has it, and it cannot render"
        raise UsageError(f"--env_kwargs reward_clipping=True: {why}")
    skip, stack, most = _frames(config, registration)
    arguments |= {"frameskip": 1, "max_num_frames_per_episode": most}
    env = make_registered(registration, **arguments)
    if hidden := next((layer for layer in layers(env) if isinstance(layer, ObservationWrapper)), None):
        what = f"pictures are taken from the emulator, beneath {type(hidden).__name__}"
        raise UsageError(f"{registration.id}: {what}; give a function that makes the environment, package.module:name")
    env = AtariPreprocessing(env, frame_skip=skip, screen_size=(width, height), **preprocessing)
    return FrameStackObservation(FireReset(env) if presses_fire else env, stack, padding_type="zero")


def _frames(config: EnvConfig, registration: Registration) -> tuple[int, int, int]:
    """Return frames per action, per observation and per episode: by a flag, else by --env_kwargs, else as usual."""
    given: dict[str, Any] = config.env_kwargs
    if not given.get("grayscale", True):  # ale-py stacks colours along an axis of their own, [4,84,84,3]
        raise UsageError(
            f"--env_kwargs grayscale=False: {registration.id} is learned in gray; --env=envpool:Pong-v5 --env_kwargs"
            " gray_scale=False shows colours as channels"
        )
    skip = int(config.env_frameskip or given.get("frameskip", FRAME_SKIP))
    stack = int(config.env_framestack or given.get("stack_num", FRAME_STACK))
    if config.horizon is not None:
        return skip, stack, config.horizon * skip
    usual = registration.kwargs.get("max_num_frames_per_episode", MAX_FRAMES)
    return skip, stack, int(given.get("max_num_frames_per_episode", usual))
