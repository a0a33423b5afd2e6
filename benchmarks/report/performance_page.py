"""The text of docs/performance.md, from the result files."""

from collections.abc import Iterable, Mapping
from typing import Any

from appo.utils.errors import UsageError
from benchmarks.peers.__main__ import OURS, ratios
from benchmarks.scores import learning
from benchmarks.shared import markdown, measuring, promises, runs
from benchmarks.speed import end_to_end, placements, policies
from benchmarks.speed.network_alone import inference_microseconds, training_microseconds

Results = Mapping[str, Mapping[str, Any]]

NAMES = {
    OURS: "**appo**",
    "sample_factory": "Sample Factory 2.1.1",
    "sample_factory_malloc": "the same, allocator tuned",
    "cleanrl_envpool": "CleanRL-style PPO + EnvPool",
    "pufferlib": "PufferLib 3.0.0",
    "stable_baselines3": "Stable-Baselines3 2.9.2, PPO",
}

LEARNING_TASKS = {
    "samples to 475 on CartPole": learning.CARTPOLE,
    "samples to 18 on Pong": learning.PONG_BY_TIME,
    "samples to 200 on LunarLander": learning.LUNAR_LANDER,
    "samples to 3,000 on HalfCheetah": learning.HALF_CHEETAH,
    "return of 18 on Pong, or after 500,000 samples": learning.PONG_BY_SAMPLES,
}

HEAD = """\
# Performance

Generated from `benchmarks/results/*.json` by `python -m benchmarks.report`; change those, not this file. A sample is
one step of one agent that was trained on (four frames in Atari and VizDoom). `us` are microseconds of one core. All are
medians, with the lowest and highest run in brackets.
"""

PICTURE = "![Samples per second beside peers](performance.png)\n"

METHOD = """\
## Method

- **Side by side.** All contenders run one after another, A B C A B C, each from its own start: `train_appo.py` as
  anyone would type it, the peers by the drivers in `benchmarks/peers`, in virtual environments of their own with pinned
  versions, as they come. Same environment, preprocessing, network, batch size and epochs; sample counts are those that
  each learner reports, their times are from one clock, and the speed is the slope of a line through all of them after a
  warm-up. EnvPool brings environments of its own, written in C++; Sample Factory steps HalfCheetah-v4, which has the
  physics of v5; its VizDoom leaves the ammunition counter out.
- **Memory** is the sum of proportional set sizes (PSS) of all processes at the end of the window; games of VizDoom are
  left out of comparisons, as everybody needs them.
- **CPU us** is the CPU time of all processes of a role in the window, over the samples trained on in it.
- **Limit** is cores / (environment + inference + training), each measured alone on one core: random actions through the
  adapter; the cheapest way to act at the batch sizes of the run; `epochs` optimizer steps per minibatch. A machine with
  no framework at all would reach it, if its cores were as fast together as one is alone. Virtual ones often are not:
  **env us, all cores at it** is what a step costs when each core runs the environment, and nothing else, at once.
  **Reached** is the median over the runs, each beside the costs measured just before it.
- **Arithmetic alone** is what the multiplications of acting and training would take at the speed of a matrix product of
  1,024 x 1,024 on one core, in float32 or bf16 as the network computes. No software can go below it without fewer or
  shorter numbers. With the environment, and nothing else, it is what nobody can pass on a machine: where that is less
  than a multiple of a peer that one hopes for, only other hardware can give it.
- A run that throws away more than 1 % of what it collects does not count.

## Where the rest of Pong goes

On Zen 5 environment, acting and training cost 557 us alone and 664 in three runs of 2026-11-23: 88 more in actors, 11
in the learner, 3 in others, 4 idle. In one process with nothing beside it (16 environments, a clock around every part),
before any core is shared; acting was measured on e030d58, the other parts hours before:

- 45 **acting**: 133 us right after the environments have been stepped, 88 when the same is repeated at once. Weights of
  3 MB, code and Python are out of the caches by then. (136 and 98 where torch draws the actions and the first kernel is
  arranged at every step.)
- 8 **the adapter**: checks, and the copy of the observations to where they are trained from.
- 9 **the framework**: messages, episodes, counts.
- 5 the environments themselves.

The other 21 us of the actors, and the learner's 11, come with sharing: learner, actors and the threads of ALE change
places 360 times per second and core, and begin with cold caches each time. With 4 epochs, where two threads of the
learner wait for each other and for Python's lock, it is 740 times: 179 more in actors and 145 in the learner.

## Tried, and left out

- **Space-to-depth before the first convolution in float32** (the same function with a smaller kernel): with AVX2, 78
  us against 89 us per sample forward and 127 us against 98 us for the gradient of the kernel; with AVX-512, 63 against
  67 and 78 against 70 (Nature network, 32 images at once). In bf16 it is done: 36 us forward, 46 us for the gradient.
  The bytes are rearranged by words of four before they become numbers, which takes 18 us with the conversion instead
  of 45.
- **Threads within operations of the learner** (what torch does with more than one): on an idle machine two make an
  update of the Nature network 1.7 times as fast, but beside actors slower than one thread, as both wait for each other
  thousands of times per minibatch (4 epochs: 145 samples/s instead of 195). So encoders of images give every thread
  rows of its own, forward and backward: 220 to 300 samples/s, with 1.05 times the CPU time of one thread. All other
  operations have one: they are too small to be divided.
- **im2col and matrix products for the gradients of kernels**: 20 and 37 us per sample less than oneDNN for the second
  and third convolution of the Nature network, nothing for the first and for the gradients of their inputs. 5 % of an
  update are not worth a convolution of our own. On Zen 5, in bf16, it is 5 and 3 of 188 us.
- **Other kernels in bf16 with AVX-512**: per image of the Nature network, 32 at once, oneDNN takes 33 + 26 + 18 us for
  the convolutions forward and 18 for the linear layer, where a large matrix product of as many multiplications takes
  33 + 27 + 18 + 16; for the gradients 41 + 84 + 53 + 37 us instead of 33 + 54 + 37 + 33. Perfect kernels could save 60
  of the 385 us of an update. The rest: images made blocks, twice, 36, a third less since the kernel is scaled instead;
  ReLU 8; losses, heads and Adam 29. Cutting blocks for the second convolution too costs as much as it saves. On Zen 5,
  64 at once: 15 + 12 + 9 us and 8 forward for 14 + 11 + 8 + 7, gradients 21 + 41 + 26 + 15 for 14 + 23 + 16 + 14, and
  8 each time that images are made blocks: perfect kernels could save 40 of 188.
- **The same for VizDoom**: convolutions forward 37 + 34 + 17 us per image, 30 + 30 + 12 as large products; gradients
  54 + 90 + 50 for 30 + 59 + 24; linear layer 41 for 32, GRU 73 for 49; ELU 49. Acting on 32 images at once:
  convolutions 36 + 34 + 16, linear layer and GRU 54 for 27, ELU 39. All of them as fast as large products, and no
  framework at all, would make a sample cost 1,030 us with its environment: 3.7 times the speed of Sample Factory.
- **ELU by exp, subtraction and maximum**: 22 us instead of 27 for what the first convolution of VizDoom makes of an
  image (bf16, AVX-512), with errors of 0.002 near zero.
- **SCHED_BATCH, or turns of 30 or 100 ms** for processes that share a core: Pong is 2, 6 and 4 % faster than with the
  usual 1.4 ms; turns of 10 ms, which learners and actors take, make 5 %, and cost 7 % of CartPole's vector entry point.
  With 30 ms, as Pong in float32 was measured above with AVX-512, actors wait half a second beside several other
  programs.
- **Batches of all images at once**: 32 at once take 10 to 15 % less time in training, and less memory. In bf16 it is 64
  now: 2 % less than 32 for Pong, 8 % for VizDoom, 96 not better (Zen 5); in float32 64 are no faster than 32.
- **More environments than fill a batch**: Pong with `--num_workers=2 --num_envs_per_worker=24` instead of 16 is 1.05 to
  1.08 times as fast (two times four pairs of runs, Zen 5), as a step of all environments of an actor has costs of its
  own: some 2 ms of Python and weights, which other environments and the learner's turns drive out of the caches. But
  what is trained on is older (policy lag 12 instead of 7 with the preset), and learning pays for it: after 270 s and
  707,890 samples the mean return is -5.5, with 16 it is 17.4 after 622,969 (seed 1). VizDoom with 48 instead of 32 is
  3 % slower, HalfCheetah 5 %.
- **Long turns for the threads of ALE too**, in which the environments of an actor are stepped: 1.007 (five pairs); with
  4 epochs 1.04 (four rounds) and 1.00 (five).
- **SCHED_BATCH at 4 epochs**, for the learner alone 0.99, for actors too 1.03, for actors alone 0.96 (four and five
  rounds): a sample costs 6 % less CPU time, but 8 % of the cores are idle, as who wakes has to wait.
- **One actor with all 32 environments of Pong and two threads of ALE**: 0.90 (three pairs). It acts on 32 at once and a
  sample costs 3 % less, but 14 % of the cores are idle while it acts or steps alone.
- **Weights of linear layers packed for oneDNN when they arrive**: acting on 16 images of Pong takes 61 us less of
  1,400, packing 476 for every new version, which is every 32 steps; private operations of torch for less than 1 %.
  Not tried: to flatten without a copy, 26 us of a step of 5,950.
- **Huge pages for the whole heap** (glibc.malloc.hugetlb=1), no fast bins: within the noise. So is the code of torch
  and numpy moved to huge pages, for acting right after environments (113 us instead of 116, Zen 5): what is cold are
  the caches, and every part pays: first convolution 4 us more, preparing bytes 5, linear layer 5, weights made ready 2,
  the other convolutions 3, heads 2, drawing 2, Python between them the rest.
- **Acting on 8 images at once instead of 16**, whose activations would stay in the second cache: 3 % slower (three
  pairs, Zen 5); on 4, with the smaller network of the preset, 5 %.

## Measuring again

    make bench                                    # the framework alone
    make bench-all                                # all that follows but for recovery, then this file; over two hours
    make bench-reliability                        # what docs/reliability.md and docs/self_play.md promise; over an hour
    python -m benchmarks.speed.env_alone          # --json=benchmarks/results/env_alone.json keeps the figures, here
    python -m benchmarks.speed.network_alone      # and in all others
    python -m benchmarks.speed.end_to_end         # --workload=pong, or --env=ID with any flags of train_appo.py
    python -m benchmarks.scores.learning          # per sample, in both precisions and beside Sample Factory
    python -m benchmarks.scores.population        # population-based training, and the same without it
    python -m benchmarks.speed.growth             # with envs, actors and slots
    python -m benchmarks.speed.placements
    python -m benchmarks.peers                    # installs the peers under ~/.cache/appo-benchmarks first
    python -m benchmarks.peers.apex_peers         # Ape-X beside the DQN of peers, in the same way
    python -m benchmarks.promises.recovery        # and under_fire, supervision, evaluation, soak, chatter, cycles
    python -m benchmarks.promises.ranks           # several learners; --only selects parts, --quick tries the parts out
    python -m benchmarks.promises.machines        # several machines on Ray, the same
    python -m benchmarks.scores.self_play         # the promise of docs/self_play.md
    python -m benchmarks.report                   # writes this file; the picture needs `pip install "appo[bench]"`

Nothing else should run meanwhile. `--prefix='flock FILE'` takes turns with others run by run; `--add` adds runs to
those in the file, or the seeds that it lacks, so that they can be measured piece by piece. On another machine give
another `--json`: every machine gets a chapter of its own.
"""

NO_GPU = """\
## On a GPU

The figures above are of processors alone. `python -m benchmarks.gpu_check` measures a GPU;
[the runtime's page](../algorithms/runtime/README.md#on-a-gpu) has its figures for an H200 and an H100.
"""


def render(files: Iterable[Mapping[str, Any]]) -> str:
    """Return docs/performance.md from the contents of result files, in any order."""
    machines = markdown.by_machine(files)
    for benchmark in (name for found in machines for name in found):
        if benchmark not in SECTIONS:
            raise UsageError(f"there is no section for results of {benchmark}")
    chapters = [HEAD] + [PICTURE] * any("peers" in found for found in machines)
    for found in machines:
        chapters += _machine_chapter(found)
    if not any(content["machine"]["gpu"] for found in machines for content in found.values()):
        chapters.append(NO_GPU)
    return "\n".join([*chapters, METHOD])


def _machine_chapter(found: markdown.Files) -> list[str]:
    """Return the tables of one machine."""
    first = next(found[name] for name in SECTIONS if name in found)
    chapter = [markdown.machine_heading(first["machine"])]
    for name, (heading, section) in SECTIONS.items():
        if name in found:
            results = found[name]["results"]
            chapter.append(f"### {heading}\n\n{section(results)}\n\n{markdown.measured(results)}\n")
    if all(name in found for name in ("peers", "end_to_end", "network_alone")):
        chapter += _bounds(*(found[name]["results"] for name in ("peers", "end_to_end", "network_alone")))
    return chapter


def _bounds(peers: Results, ends: Results, networks: Results) -> list[str]:
    """Return the bounds of any framework: all cores busy with environments and multiplications, and nothing else."""
    rows = []
    for workload in (name for name in peers if name in ends and name in networks):
        env, floor = ends[workload]["unit_costs"]["environment"], networks[workload]["floor"]
        training = networks[workload]["epochs"] * floor["training"]
        bound = measuring.steps_per_second_at_most(ends[workload]["cores"], (env, floor["acting"], training))
        speeds = {
            name: runs.summary(of_one)["samples_per_second"].median
            for name, of_one in peers[workload]["contenders"].items()
        }
        ours = speeds.pop(OURS)
        times = ", ".join(f"{NAMES[name]} {bound / speed:.1f}x" for name, speed in speeds.items())
        units = f"{env:.3g} + {floor['acting']:.3g} + {training:.3g}"
        rows.append((f"`{workload}`", units, f"{bound:,.0f}", f"{ours / bound:.0%}", times))
    heads = ("workload", "env + arithmetic of acting + training, us", "bound", "appo reaches", "the bound is, over")
    return [f"### What nobody can pass here\n\n{markdown.table(heads, rows)}\n"] if rows else []


def _peers(results: Results) -> str:
    rows = []
    for workload, result in results.items():
        times = ratios(result)
        for i, (name, of_one) in enumerate(result["contenders"].items()):
            r = runs.summary(of_one)
            speed, memory = (f"{ratio:.2f}x" for ratio in times[name]) if name in times else ("", "")
            title = f"{result['what']} (`{workload}`)" if not i else ""
            mark = "" if r["counts"] else ", discards too much"
            rows.append(
                (title, NAMES[name], _spread(r["samples_per_second"]) + mark, f"{r['cpu_share']:.0%}",
                 f"{r['pss_mib']:,.0f}", speed, memory)
            )  # fmt: skip
    return markdown.table(("workload", "", "samples/s", "CPU", "PSS MiB", "appo is", "with memory"), rows)


def _end_to_end(results: Results) -> str:
    rows = []
    for workload, result in results.items():
        r, costs = runs.summary(result["runs"]), result["unit_costs"]
        units = " + ".join(f"{costs[part]:.3g}" for part in end_to_end.UNIT_COSTS)
        roles = ", ".join(f"{role} {us:.3g}" for role, us in r["cpu_microseconds"].items())
        mark = "" if r["counts"] else " (does not count)"
        together, share = costs.get(end_to_end.TOGETHER), end_to_end.reached(result)
        reached = f"{share.median:.0%} ({share.lowest:.0%} - {share.highest:.0%})"
        rows.append(
            (f"`{workload}`", _spread(r["samples_per_second"]), units,
             f"{together:.3g}" if together else "", f"{end_to_end.limit(result):,.0f}",
             reached, roles, f"{r['discarded_share']:.2%}{mark}", f"{r['pss_mib']:,.0f}")
        )  # fmt: skip
    heads = (
        "workload",
        "samples/s",
        "env + act + train us",
        "env us, all cores at it",
        "limit",
        "reached",
        "CPU us by role",
        "discarded",
        "PSS MiB",
    )
    return markdown.table(heads, rows)


def _env_alone(results: Results) -> str:
    rows = [
        (f"`{workload}`", r["rows"], _spread(r["one"]["adapter"]), _spread(r["one"]["actor"]),
         _spread(r["all"]["adapter"]), _spread(r["all"]["actor"]))
        for workload, r in results.items()
    ]  # fmt: skip
    heads = ("workload", "rows", "adapter us", "actor us", "adapter us, a process per core", "actor us, the same")
    return markdown.table(heads, rows)


def _network_alone(results: Results) -> str:
    rows = []
    for workload, r in results.items():
        forward = ", ".join(f"{cost['median']:.3g} ({size})" for size, cost in r["forward"].items())
        rows.append(
            (f"`{workload}`", f"{r['weights']:,} {r['dtype']}", forward, f"{r['acting']['median']:.3g} ({r['rows']})",
             f"{r['update']['median']:.3g} x {r['epochs']}", f"{r['learning']['median']:.3g}", f"{r['faults']:.2f}",
             f"{inference_microseconds(r):.3g} + {training_microseconds(r):.3g}",
             f"{r['floor']['acting']:.3g} + {r['epochs'] * r['floor']['training']:.3g}")
        )  # fmt: skip
    heads = (
        *("workload", "weights", "forward us (rows)", "acting us (rows)", "update us x epochs", "learning us"),
        *("faults per sample", "in the limit", "arithmetic alone"),
    )
    return markdown.table(heads, rows)


def _placements(results: Results) -> str:
    rows = []
    for workload, result in results.items():
        of_runs = result["placements"]
        cells = [
            _spread(measuring.spread([run["samples_per_second"] for run in of_runs[name]]))
            for name in placements.PLACEMENTS
        ]
        rows.append((f"`{workload}`", *cells, f"{placements.auto_to_best(result):.2f}"))
    return markdown.table(("samples/s", *placements.PLACEMENTS, "auto / best"), rows)


def _framework(results: Results) -> str:
    rows = [
        (f"{r['obs_bytes']:,}", f"{r['samples_per_second']:,} ({r['lowest']:,} - {r['highest']:,})",
         f"{r['microseconds_per_step']}", f"{r['samples_per_cpu_second']:,}")
        for r in results.values()
    ]  # fmt: skip
    return markdown.table(("bytes of an observation", "samples/s", "us per step of 64 rows", "per CPU second"), rows)


def _growth(results: Results) -> str:
    envs, actors, apex, slots = (
        results[name]["costs"].items() if name in results else () for name in ("envs", "actors", "apex", "slots")
    )
    rows = [(f"{count} envs", "vector step of an actor", f"{us['median']:.1f} us") for count, us in envs]
    for count, roles in actors:
        rows.append((f"{count} actors", "vector step, acting included", f"{roles['actor']['median']:.1f} us"))
        rows.append((f"{count} actors", "learner, per slot", f"{roles['learner']['median']:.1f} us"))
    for count, us in apex:
        rows.append((f"{count} actors", "Ape-X, framework alone, per agent step", f"{us['median']:.2f} us"))
    rows += [(f"{count} slots", "memory of all processes", f"{mib:.0f} MiB") for count, mib in slots]
    return markdown.table(("with", "costs", "CPU time, memory"), rows)


def _learning(results: Results) -> str:
    seeds = sorted({seed for result in results.values() for seed in result["seeds"]}, key=int)
    tables = []
    for title, task in LEARNING_TASKS.items():
        found = {name: of["seeds"] for name, of in results.items() if learning.CONTENDERS[name].task == task}
        rows = [(_learner(name), *(_learned(of.get(seed)) for seed in seeds)) for name, of in found.items()]
        if rows:
            tables.append(markdown.table((title, *(f"seed {seed}" for seed in seeds)), rows))
    return "\n\n".join(tables)


def _learner(name: str) -> str:
    """Return the name of a contender of `learning`, without the environment."""
    peer = learning.CONTENDERS[name].peer
    return NAMES[peer] if peer else f"**appo**, {name.rpartition('_')[2]}"


def _learned(outcome: Mapping[str, Any] | None) -> str:
    if outcome is None:
        return ""
    names = ("samples", "seconds", "reached", "mean")
    return learning.Learned(*(outcome.get(name) for name in names)).line()


def _promises(results: Results) -> str:
    rows = [figure.cells() for result in results.values() for figure in promises.figures_of(result)]
    return markdown.table(("", "measured", "promised: at most"), rows)


def _population(results: Results) -> str:
    rows = [
        (f"{name}, seed {seed}", ", ".join(f"{one:.1f}" for one in of["returns"]), f"{min(of['returns']):.1f}",
         of["copies"], of["mutations"])
        for name, result in results.items()
        for seed, of in result["seeds"].items()
    ]  # fmt: skip
    return markdown.table(("CartPole, four learning rates", "mean returns", "the worst", "copies", "mutations"), rows)


def _policies(results: Results) -> str:
    rows = [(f"`{name}`", *row.cells()) for name, result in results.items() for row in policies.rows(result)]
    return markdown.table(("", *policies.HEADS), rows)


def _self_play(results: Results) -> str:
    rows = [
        (f"{name}, seed {seed}", ", ".join(f"{one:.3f}" for one in of["mean"]), f"{of['farthest']:.3f}",
         f"{of['win_rate']:.2f}")
        for name, result in results.items()
        for seed, of in result["seeds"].items()
    ]  # fmt: skip
    return markdown.table(
        ("rock-paper-scissors", "mean strategy of the pool", "farthest from a third", "win rate"), rows
    )


SECTIONS = {
    "peers": ("Side by side with peers", _peers),
    "end_to_end": ("End to end, and the limit", _end_to_end),
    "placements": ("Placements", _placements),
    "env_alone": ("The environment alone", _env_alone),
    "network_alone": ("The network alone", _network_alone),
    "framework": ("The framework alone", _framework),
    "learning": ("Learning, the same hyperparameters", _learning),
    "growth": ("How costs grow", _growth),
    "population": ("Populations", _population),
    "policies": ("Several policies", _policies),
    "self_play": ("Self-play", _self_play),
    "recovery": ("Reliability: until training goes on after a kill", _promises),
    "under_fire": ("Reliability: learning under fire", _promises),
    "supervision": ("Reliability: what supervision costs", _promises),
    "evaluation": ("What evaluation costs", _promises),
    "soak": ("Reliability: a long run", _promises),
    "chatter": ("Reliability: an environment that prints without end", _promises),
    "cycles": ("Reliability: killed and started again", _promises),
    "ranks": ("Several learners of one policy", _promises),
    "machines": ("Several machines on Ray", _promises),
}
"""In this order: heading, and the function that makes the table of a benchmark's results."""


def _spread(spread: Any) -> str:
    """Format a `Spread` or its JSON as `1,234 (1,200 - 1,300, 3 runs)`."""
    s = spread if isinstance(spread, measuring.Spread) else measuring.Spread(**spread)
    shown = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in s[:3]]
    return f"{shown[0]} ({shown[1]} - {shown[2]}, {s.runs} runs)" if s.runs > 1 else f"{shown[0]} (1 run)"
