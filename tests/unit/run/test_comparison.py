from appo.algorithms.run.policies import comparison
from appo.algorithms.runtime.monitor.policy_progress import PolicyProgress


def progress_of(*returns: float) -> PolicyProgress:
    progress = PolicyProgress(100)
    progress.episode_return.append(returns)
    return progress


def test_the_report_says_what_differs() -> None:
    policies = [progress_of(1, 2, 3), progress_of(11, 12, 13), progress_of(2, 2, 3), progress_of()]
    given = [{"gamma": gamma} for gamma in (0.9, 0.95, 0.99, 0.999)]
    assert comparison(policies, given) == [
        "policy 1 (gamma=0.95) against policy 0 (gamma=0.9): return +10.00, 95 % interval [+7.73, +12.27] over their "
        "last 3 and 3 episodes",
        "policy 2 (gamma=0.99) against policy 0 (gamma=0.9): return +0.33, 95 % interval [-1.72, +2.38] over their "
        "last 3 and 3 episodes: no difference that these episodes show",
    ]
