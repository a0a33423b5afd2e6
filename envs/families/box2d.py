"""Box2D's environments, made by gymnasium without an adapter."""

from appo.envs.family import Family

FAMILY = Family(
    "Box2D",
    package="Box2D",
    extra="box2d",
    examples=("LunarLander-v3",),
    entry_points=r"gymnasium\.envs\.box2d",
    harmless={
        **dict.fromkeys(("continuous", "hardcore", "enable_wind", "domain_randomize", "verbose"), 1.0),
        **dict.fromkeys(("gravity", "wind_power", "turbulence_power", "lap_complete_percent"), 100.0),
    },
)
