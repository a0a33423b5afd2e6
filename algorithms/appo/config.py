"""The flags of APPO."""

from dataclasses import dataclass, replace
from typing import Self

from appo.algorithms.datasets.config import InputConfig
from appo.algorithms.parts.config import ACTOR_CRITIC_METRICS, SURROGATE_METRICS, SurrogateConfig
from appo.utils.errors import UsageError
from appo.utils.flags import flag, same_flag


@dataclass(frozen=True)
class APPOConfig(InputConfig, SurrogateConfig):
    """Learning."""

    gae_lambda: float = same_flag(
        SurrogateConfig,
        "gae_lambda",
        "mixing of n-step estimates by GAE, used with --with_vtrace=False",
        needs="with_vtrace=False",
    )
    with_vtrace: bool = flag(True, "V-trace off-policy corrected returns instead of GAE")
    vtrace_rho: float = flag(
        1.0, "upper limit of the importance weight of a temporal difference", minimum=0, needs="with_vtrace"
    )
    vtrace_c: float = flag(1.0, "upper limit of the importance weight of the trace", minimum=0, needs="with_vtrace")
    vtrace_lambda: float = flag(
        1.0, "further discount of the trace of V-trace", minimum=0, maximum=1, needs="with_vtrace"
    )
    exploration_loss: str = flag(
        "entropy",
        "bonus for exploring: entropy, or symmetric_kl to the uniform distribution (discrete actions only)",
        choices=("entropy", "symmetric_kl"),
        needs="exploration_loss_coeff",
    )
    kl_loss_coeff: float = flag(0.0, "weight of the KL divergence to the behaviour policy; 0 = off", minimum=0)

    def one_update(self, size: int) -> Self:
        """Return flags for an iteration of a single update on a batch of this size, for measuring time."""
        microbatch = self.microbatch_size if self.microbatch_size < size else 0
        return replace(super().one_update(size), microbatch_size=microbatch, ppo_epochs=1)

    def check(self) -> None:
        """Refuse sizes that do not divide each other (UsageError)."""
        super().check()
        if self.microbatch_size % self.rollout:
            raise UsageError(f"--microbatch_size={self.microbatch_size} is not a multiple of --rollout={self.rollout}")
        if self.microbatch_size > self.batch_size:
            raise UsageError(f"--microbatch_size={self.microbatch_size} is larger than --batch_size={self.batch_size}")
        if not self.mix.datasets:
            return
        if not self.mix.sampler:
            raise UsageError(
                "--input: APPO learns from what it plays too: mix with sampler, or clone with BC or MARWIL"
            )
        if not self.with_vtrace:
            raise UsageError("--input: what others have done is learned from with V-trace, not --with_vtrace=False")
        if self.lr_schedule.startswith("kl_adaptive") or self.target_kl:
            flag = f"--target_kl={self.target_kl:g}" if self.target_kl else f"--lr_schedule={self.lr_schedule}"
            raise UsageError(
                f"{flag}: with --input, the KL divergence is measured on played steps alone, and a batch may have few"
                " of them, or none"
            )
        if self.macro_batch_columns < 2:
            raise UsageError("--input: a batch of one trajectory cannot be mixed, raise --batch_size")


METRICS = {
    **ACTOR_CRITIC_METRICS,
    **SURROGATE_METRICS,
    "advantage_std": "standard deviation of the advantages before normalization, in units of return",
}
