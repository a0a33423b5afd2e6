import numpy as np
import pytest
import torch

from appo.algorithms.ops import numpy_returns, returns
from appo.algorithms.ops.losses import clamped_ratio, masked_mean, ppo_policy_loss
from appo.algorithms.ops.returns import Returns, gae, vtrace
from tests.unit.ops.trajectories import (
    NEXT_STEP,
    SAME_STEP,
    Trajectory,
    as_next_step,
    as_same_step,
    over_columns,
    random_tape,
    random_trajectory,
)

NUM_RANDOM_CASES = 1000


def tensor(*rows: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(rows, dtype=dtype)[:, None]


def episode(
    reward: tuple[float, ...],
    value: tuple[float, ...],
    terminated: tuple[int, ...] = (),
    truncated: tuple[int, ...] = (),
    first: tuple[int, ...] = (),
    invalid: tuple[int, ...] = (),
) -> dict[str, torch.Tensor]:
    """One column; flags are given by the indices where they are set."""
    steps = len(reward)

    def at(indices: tuple[int, ...], rows: int) -> torch.Tensor:
        return torch.tensor([t in indices for t in range(rows)], dtype=torch.bool)[:, None]

    return {
        "reward": tensor(*reward),
        "value": tensor(*value),
        "terminated": at(terminated, steps),
        "truncated": at(truncated, steps),
        "valid": ~at(invalid, steps),
        "first": at(first, steps + 1),
    }


def assert_column(actual: torch.Tensor, *expected: float) -> None:
    torch.testing.assert_close(actual, tensor(*expected), rtol=0, atol=1e-6)


def assert_matches(actual: Returns, expected: tuple[np.ndarray, np.ndarray]) -> None:
    for got, want in zip(actual, expected, strict=True):
        np.testing.assert_allclose(got.numpy(), want, rtol=2e-5, atol=2e-5)


def random_case(seed: int) -> tuple[np.random.Generator, Trajectory, float]:
    rng = np.random.default_rng(seed)
    reset = NEXT_STEP if seed % 2 else SAME_STEP
    trajectory = random_trajectory(rng, reset, steps=int(rng.integers(1, 14)), columns=int(rng.integers(1, 5)))
    return rng, trajectory, float(rng.choice([0.0, 0.5, 0.9, 0.99, 1.0]))


class TestAgainstReference:
    def test_vtrace(self) -> None:
        for seed in range(NUM_RANDOM_CASES):
            rng, trajectory, gamma = random_case(seed)
            lam, rho_clip, c_clip = rng.choice([0.0, 0.5, 0.95, 1.0]), rng.uniform(0.5, 2.0), rng.uniform(0.3, 1.5)
            ratio = np.where(trajectory.valid, rng.uniform(0.05, 3.0, trajectory.valid.shape), np.nan)
            result = vtrace(
                ratio=torch.tensor(ratio, dtype=torch.float32),
                **trajectory.tensors(),
                gamma=gamma,
                vtrace_lambda=lam,
                rho_clip=rho_clip,
                c_clip=c_clip,
            )
            expected = over_columns(
                trajectory,
                gamma,
                lambda r, b, ratio=ratio, args=(lam, rho_clip, c_clip): r.vtrace(ratio[:, b].tolist(), *args),
            )
            assert_matches(result, expected)

    def test_gae(self) -> None:
        for seed in range(NUM_RANDOM_CASES):
            rng, trajectory, gamma = random_case(seed)
            lam = float(rng.choice([0.0, 0.5, 0.95, 1.0]))
            result = gae(**trajectory.tensors(), gamma=gamma, gae_lambda=lam)
            assert_matches(result, over_columns(trajectory, gamma, lambda r, _, lam=lam: r.gae(lam)))

    def test_random_cases_contain_what_they_claim(self) -> None:
        cases = [random_case(seed)[1] for seed in range(NUM_RANDOM_CASES)]
        assert sum((c.valid & c.truncated & ~c.terminated).sum() for c in cases) > 500
        assert sum((c.valid & c.terminated).sum() for c in cases) > 500
        assert sum((c.valid & c.terminated & c.truncated).sum() for c in cases) > 100
        assert sum((~c.valid).sum() for c in cases) > 2000
        assert sum((~c.valid[0] & c.first[0]).sum() for c in cases) > 100  # staggered starts
        assert (
            sum((~c.valid[0] & ~c.first[0] & c.first[1]).sum() for c in cases) > 50
        )  # reset row at the head of a slot
        assert sum(np.isnan(c.value).sum() for c in cases) > 500
        assert sum((~c.valid).all() for c in cases) > 0  # nothing valid at all

    def test_both_recursions_agree(self) -> None:
        generator = torch.Generator().manual_seed(0)
        for steps in (1, 2, 33):
            term, decay = torch.randn(steps, 5, generator=generator), torch.rand(steps - 1, 5, generator=generator)
            on_device = returns._accumulate_on_device(term, decay)
            torch.testing.assert_close(returns._accumulate_rows(term, decay), on_device, rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_results_are_float32(self, dtype: torch.dtype) -> None:
        case = episode((1, 1), (0, 0, 0))
        case = {name: x if x.dtype == torch.bool else x.to(dtype) for name, x in case.items()}
        results = [*gae(**case, gamma=1.0, gae_lambda=1.0), *vtrace(ratio=case["reward"], **case, gamma=1.0)]
        assert {x.dtype for x in results} == {torch.float32}


class TestGolden:
    """Worked by hand: gamma 1/2; step 1 is cut by a time limit, row 2 resets, step 3 goes on into the next slot."""

    CASE = episode((1, 1, 0, 1), (1, 2, 3, 4, 5), truncated=(1,), first=(0, 3), invalid=(2,))

    def test_vtrace(self) -> None:
        result = vtrace(ratio=tensor(0.5, 2.0, 9.0, 1.0), **self.CASE, gamma=0.5)
        assert_column(result.target, 1.625, 2.5, 0, 3.5)
        assert_column(result.advantage, 1.25, 0.5, 0, -0.5)

    def test_vtrace_with_other_clips_and_lambda(self) -> None:
        result = vtrace(
            ratio=tensor(0.5, 2.0, 9.0, 1.0), **self.CASE, gamma=0.5, vtrace_lambda=0.5, rho_clip=2.0, c_clip=0.25
        )
        # rho = .5, 2, -, 1; c = .125. vs1 = 2 + 2 * .5 = 3; vs0 = 1 + .5 * 1 + .5 * .125 * (3 - 2)
        assert_column(result.target, 1.5625, 3.0, 0, 3.5)
        assert_column(result.advantage, 1.5, 0.5, 0, -0.5)

    def test_gae(self) -> None:
        result = gae(**self.CASE, gamma=0.5, gae_lambda=0.5)
        assert_column(result.advantage, 1.125, 0.5, 0, -0.5)
        assert_column(result.target, 2.125, 2.5, 0, 3.5)

    def test_a_step_that_failed_is_a_time_limit_for_the_one_before(self) -> None:
        """Row 2 is the last that the failed environment showed, so its value is right; nothing later is seen."""
        for seed in range(10):
            later = np.random.default_rng(seed).normal(size=4) * 100
            case = episode((1, 1, float("nan"), later[0]), (1, 2, 3, *later[1:3]), first=(0, 3), invalid=(2,))
            result = vtrace(ratio=tensor(0.5, 2.0, float("nan"), 1.0), **case, gamma=0.5)
            assert_column(result.target[:3], 1.625, 2.5, 0)
            assert_column(result.advantage[:3], 1.25, 0.5, 0)
            assert_column(gae(**case, gamma=0.5, gae_lambda=0.5).target[:3], 2.125, 2.5, 0)
            signals = {name: x.numpy() for name, x in case.items() if name != "value"}
            steps = numpy_returns.TrajectoryTerms.of(signals, case["value"].numpy(), None, 0.5)
            ratio = np.array([0.5, 2.0, 0.0, 1.0], np.float32)[:, None]
            advantage, target = numpy_returns.vtrace(steps, ratio, 0.5, 1.0, 1.0, 1.0)
            assert target[:3, 0].tolist() == [1.625, 2.5, 0]
            assert advantage[:3, 0].tolist() == [1.25, 0.5, 0]
            assert numpy_returns.gae(steps, 0.5, 0.5)[1][:3, 0].tolist() == [2.125, 2.5, 0]

    def test_same_step_reset_with_termination_and_truncation(self) -> None:
        case = episode((1, 1, 1, 1), (1, 2, 3, 4, 5), terminated=(0,), truncated=(2,), first=(0, 1, 3))
        result = vtrace(ratio=tensor(1, 1, 1, 1), **case, final_value=tensor(9, 9, 8, 9), gamma=0.5)
        # 3: 1 + 2.5; 2: 1 + 4 of its own final state; 1: 1 + .5 * 5; 0: 1, nothing after it
        assert_column(result.target, 1, 3.5, 5, 3.5)
        assert_column(result.advantage, 0, 1.5, 2, -0.5)


class TestResetModes:
    def test_next_step_and_same_step_give_identical_targets(self) -> None:
        rng = np.random.default_rng(5)
        for _ in range(300):
            tape = random_tape(rng, steps=int(rng.integers(1, 16)))
            results = []
            for trajectory, ratio in (as_same_step(tape), as_next_step(tape)):
                kwargs = trajectory.tensors()
                weights = torch.tensor(ratio, dtype=torch.float32)
                for result in (vtrace(ratio=weights, **kwargs, gamma=0.9), gae(**kwargs, gamma=0.9, gae_lambda=0.8)):
                    results += [x[kwargs["valid"]] for x in result]
            for same_step, next_step in zip(results[:4], results[4:], strict=True):
                assert torch.equal(same_step, next_step)

    def test_time_limit_is_bootstrapped_and_a_terminal_state_is_not(self) -> None:
        for flags, future in (({"truncated": (1,)}, 4.0), ({"terminated": (1,)}, 0.0)):
            result = gae(**episode((1, 1), (0, 0, 4), **flags), gamma=1.0, gae_lambda=1.0)
            assert_column(result.target, 2 + future, 1 + future)

    def test_terminated_wins_where_an_env_sets_both(self) -> None:
        case = episode((1,), (0, float("nan")), terminated=(0,), truncated=(0,))
        assert_column(gae(**case, gamma=1.0, gae_lambda=1.0).target, 1.0)

    def test_final_value_of_rows_that_did_not_end_is_ignored(self) -> None:
        case = episode((1, 1, 1), (1, 1, 1, 1), truncated=(1,), first=(2,))
        garbage = tensor(float("nan"), 3.0, float("inf"))
        result = gae(**case, final_value=garbage, gamma=1.0, gae_lambda=0.0)
        assert_column(result.target, 2, 4, 2)

    def test_truncated_step_without_any_final_value_never_sees_the_next_episode(self) -> None:
        case = episode((1, 1), (5, 100, 100), truncated=(0,), first=(1,))
        assert_column(gae(**case, gamma=1.0, gae_lambda=1.0).target[:1], 6.0)

    def test_truncation_in_the_last_step_of_a_slot_and_reset_row_in_the_next(self) -> None:
        ends = episode((1, 1), (0, 0, 4), truncated=(1,))
        assert_column(gae(**ends, gamma=1.0, gae_lambda=1.0).target, 6, 5)
        begins = episode((0, 1), (4, 0, 7), first=(1,), invalid=(0,))
        assert_column(gae(**begins, gamma=1.0, gae_lambda=1.0).target, 0, 8)

    def test_an_episode_never_feeds_the_one_before_even_without_a_done_flag(self) -> None:
        case = episode((1, 1000), (5, 0, 0), first=(1,))
        for final_value, expected in ((None, 6.0), (tensor(3, 0), 4.0)):
            result = vtrace(ratio=tensor(1, 1), **case, final_value=final_value, gamma=1.0)
            assert_column(result.target[:1], expected)

    def test_a_done_ends_the_trace_even_where_no_reset_follows(self) -> None:
        """A horizon that is reported but not followed by a reset: bootstrapped, and nothing after it is seen."""
        case = episode((1, 1000), (0, 4, 0), truncated=(0,))
        for result in (vtrace(ratio=tensor(1, 1), **case, gamma=1.0), gae(**case, gamma=1.0, gae_lambda=1.0)):
            assert_column(result.target, 5, 1000)
            assert_column(result.advantage, 5, 996)


class TestMistakesOfEarlierSystems:
    def test_last_step_is_bootstrapped_from_the_real_next_value(self) -> None:
        """A made-up value of (V - r) / gamma gives the last step the difference 0, whatever happened there."""
        result = vtrace(ratio=tensor(1, 1), **episode((0, 1), (0, 0, 10)), gamma=0.5)
        assert_column(result.advantage, 3, 6)

    def test_importance_weight_enters_the_policy_gradient_once(self) -> None:
        """The surrogate multiplies by the ratio, so the advantage of a step must not depend on the step's own ratio."""
        case = episode((1, 2, 3), (1, 0, 2, 1))
        low = vtrace(ratio=tensor(0.1, 1, 1), **case, gamma=0.9).advantage
        high = vtrace(ratio=tensor(10, 1, 1), **case, gamma=0.9).advantage
        assert torch.equal(low, high)

    def test_gae_target_is_advantage_plus_value_not_the_discounted_return(self) -> None:
        case = episode((1, 1, 1), (3, 1, 2, 0), terminated=(2,))
        result = gae(**case, gamma=1.0, gae_lambda=0.5)
        assert_column(result.target, *(result.advantage + case["value"][:-1])[:, 0].tolist())
        assert abs(float(result.target[0, 0]) - 3.0) > 0.1  # 3 is the plain sum of rewards

    def test_reset_row_feeds_nothing_back(self) -> None:
        """Row 1 is a reset step; neither its difference nor the episode after it may reach row 0."""
        case = episode((1, 0, 50), (0, 7, 0, 0), truncated=(0,), first=(2,), invalid=(1,))
        other = {**case, "reward": tensor(1, -999, 80), "value": tensor(0, 7, 3, 5)}
        for key, expected in (("target", 8.0), ("advantage", 8.0)):
            for trajectory in (case, other):
                result = vtrace(ratio=tensor(1, 1, 1), **trajectory, gamma=1.0)
                assert float(getattr(result, key)[0, 0]) == expected

    def test_rho_and_c_are_clipped_apart(self) -> None:
        case = episode((1, 1), (0, 0, 0))
        by_rho = vtrace(ratio=tensor(4, 4), **case, gamma=1.0, rho_clip=2.0, c_clip=1.0).target
        by_c = vtrace(ratio=tensor(4, 4), **case, gamma=1.0, rho_clip=1.0, c_clip=2.0).target
        assert_column(by_rho, 4, 2)
        assert_column(by_c, 3, 1)


class TestOnPolicy:
    def test_vtrace_is_the_return_of_lambda_one(self) -> None:
        for seed in range(100):
            _, trajectory, gamma = random_case(seed)
            kwargs = trajectory.tensors()
            on_policy = vtrace(ratio=torch.ones_like(kwargs["reward"]), **kwargs, gamma=gamma)
            estimate = gae(**kwargs, gamma=gamma, gae_lambda=1.0)
            for a, b in zip(on_policy, estimate, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("seed", range(20))
    def test_policy_gradient_is_the_on_policy_one(self, seed: int) -> None:
        rng, trajectory, _ = random_case(seed)
        kwargs = trajectory.tensors()
        shape = kwargs["reward"].shape
        logits = torch.tensor(rng.normal(size=(*shape, 4)), dtype=torch.float32, requires_grad=True)
        action = torch.tensor(rng.integers(0, 4, shape))
        log_prob = logits.log_softmax(-1).gather(-1, action[..., None])[..., 0]

        ratio = clamped_ratio(log_prob, log_prob.detach())
        advantage = vtrace(ratio=ratio, **kwargs, gamma=0.9).advantage
        surrogate = masked_mean(ppo_policy_loss(ratio, advantage, clip_ratio=0.1), kwargs["valid"])
        on_policy_advantage = gae(**kwargs, gamma=0.9, gae_lambda=1.0).advantage
        vanilla = masked_mean(-log_prob * on_policy_advantage, kwargs["valid"])

        (ours,) = torch.autograd.grad(surrogate, logits, retain_graph=True)
        (theirs,) = torch.autograd.grad(vanilla, logits)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


class TestCleanliness:
    @pytest.mark.parametrize("seed", range(40))
    def test_garbage_in_invalid_rows_leaks_nowhere(self, seed: int) -> None:
        _, trajectory, gamma = random_case(seed)
        poisoned, clean = trajectory.tensors(), trajectory.clean().tensors()
        valid = poisoned["valid"]
        ratio = torch.where(valid, 1.5, torch.nan)
        for a, b in (
            (vtrace(ratio=ratio, **poisoned, gamma=gamma), vtrace(ratio=ratio.nan_to_num(), **clean, gamma=gamma)),
            (gae(**poisoned, gamma=gamma, gae_lambda=0.9), gae(**clean, gamma=gamma, gae_lambda=0.9)),
        ):
            for x, y in zip(a, b, strict=True):
                assert torch.equal(x, y)
                assert x.isfinite().all()
                assert (x[~valid] == 0).all()

    def test_inputs_are_never_changed(self) -> None:
        for seed in range(20):
            _, trajectory, gamma = random_case(seed)
            kwargs = trajectory.tensors()
            kwargs["ratio"] = torch.full_like(kwargs["reward"], 3.0)
            before = {name: None if x is None else x.clone() for name, x in kwargs.items()}
            vtrace(**kwargs, gamma=gamma)
            gae(**{name: x for name, x in kwargs.items() if name != "ratio"}, gamma=gamma, gae_lambda=0.9)
            for name, x in kwargs.items():
                assert x is None or torch.equal(x.nan_to_num(123.0), before[name].nan_to_num(123.0)), name

    def test_results_share_no_memory_with_inputs_and_carry_no_gradient(self) -> None:
        case = episode((1, 2), (3, 4, 5))
        case["value"].requires_grad_()
        ratio = tensor(1, 1).requires_grad_()
        for result in (vtrace(ratio=ratio, **case, gamma=0.9), gae(**case, gamma=0.9, gae_lambda=0.9)):
            for x in result:
                assert not x.requires_grad
                assert x.data_ptr() not in {case["reward"].data_ptr(), case["value"].data_ptr(), ratio.data_ptr()}
            assert result.advantage.data_ptr() != result.target.data_ptr()

    def test_strided_inputs(self) -> None:
        """Columns of a batch are views of the arena."""
        _, trajectory, gamma = random_case(3)
        kwargs = trajectory.tensors()
        strided = {n: None if x is None else torch.stack([x, x], -1)[..., 0] for n, x in kwargs.items()}
        a, b = (gae(**k, gamma=gamma, gae_lambda=0.9) for k in (kwargs, strided))
        assert torch.equal(a.advantage, b.advantage)


class TestShapes:
    def test_wrong_shapes_are_named(self) -> None:
        case = episode((1, 1), (0, 0, 0))
        for name, wrong in (
            ("reward", torch.zeros(3, 1)),
            ("first", torch.zeros(2, 1, dtype=torch.bool)),
            ("valid", torch.ones(2, 2, dtype=torch.bool)),
            ("terminated", torch.zeros(2, dtype=torch.bool)),
            ("final_value", torch.zeros(3, 1)),
            ("value", torch.zeros(3)),
        ):
            with pytest.raises(ValueError, match=f"{name}: expected shape"):
                gae(**{**case, name: wrong}, gamma=0.9, gae_lambda=0.9)
        with pytest.raises(ValueError, match=r"ratio: expected shape \[2, 1\] as reward has, got \[1, 1\]"):
            vtrace(ratio=torch.ones(1, 1), **case, gamma=0.9)

    def test_a_trajectory_has_a_step(self) -> None:
        with pytest.raises(ValueError, match="at least 2 rows"):
            gae(**episode((), (1,)), gamma=0.9, gae_lambda=0.9)
