"""MuJoCo's environments, made by gymnasium without an adapter."""

from appo.envs.family import PIXELS, WEIGHT, Family

FAMILY = Family(
    "MuJoCo",
    package="mujoco",
    extra="mujoco",
    examples=("HalfCheetah-v5",),
    entry_points=r"gymnasium\.envs\.mujoco",
    harmless={
        **dict.fromkeys(
            (
                "forward_reward_weight", "ctrl_cost_weight", "contact_cost_weight", "healthy_reward",
                "reset_noise_scale", "healthy_z_range", "healthy_state_range", "healthy_angle_range",
                "contact_force_range", "contact_cost_range", "uph_cost_weight", "impact_cost_weight",
                "impact_cost_range", "reward_near_weight", "reward_dist_weight", "reward_control_weight",
            ),
            WEIGHT,
        ),
        **dict.fromkeys(
            (
                "terminate_when_unhealthy", "exclude_current_positions_from_observation",
                "include_cfrc_ext_in_observation", "include_cinert_in_observation", "include_cvel_in_observation",
                "include_qfrc_actuator_in_observation",
            ),
            1.0,
        ),
        "frame_skip": 100,
        "width": PIXELS,
        "height": PIXELS,
    },
)  # fmt: skip
