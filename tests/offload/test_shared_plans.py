"""Steps that several jobs share follow a plan of their own, and the lone job's comes back."""

from __future__ import annotations

from bench.sweeps import simulated_figures
from hypothesis import given
from hypothesis import strategies as st
from offload.test_plan import BLOCK_BYTES, equal_blocks, small_inputs

from offloadd.offload.planning.plan import Plan, PlanInput, make_plan
from offloadd.offload.planning.sharing import PATIENCE_STEPS, SharedPlans, shared_plan

TRANSFER_LIMITED = equal_blocks(24, copies_to_compute=32.0, budget_blocks=2.0)


def test_sharers_get_a_second_place_in_the_ring_where_a_lone_job_keeps_a_group() -> None:
    alone = make_plan(TRANSFER_LIMITED)
    assert (len(alone.resident), alone.ring_bytes) == (1, BLOCK_BYTES)
    together = shared_plan(alone, 8)
    assert (len(together.resident), together.ring_bytes) == (0, 2 * BLOCK_BYTES)
    # With one place each group would come only after all eight have computed: 1 + 8/32.
    assert together.predicted_step_s < 1.02 * sum(together.work().copy_s)


def test_on_a_link_a_pass_of_eight_takes_little_more_than_one_transfer() -> None:
    figures = simulated_figures()
    assert figures["sweep_identical_simulated_link"]
    # 52 steps in 7 passes: 7.43 if a pass took exactly as long as a step alone.
    assert figures["sweep_speedup_simulated_link"] > 7.0


@given(small_inputs(), st.integers(2, 9))
def test_a_shared_plan_fits_and_is_not_slower_for_sharers_than_that_of_one(
    one: PlanInput, sharers: int
) -> None:
    alone = make_plan(one)
    together = shared_plan(alone, sharers)
    assert together.predicted_device_bytes <= one.budget_bytes
    kept = Plan(together.given, alone.resident, alone.ring_bytes, 0.0)
    assert together.predicted_step_s <= 1.001 * kept.timeline().step_s


def test_more_sharers_are_followed_at_once_and_fewer_after_some_steps() -> None:
    alone = make_plan(TRANSFER_LIMITED)
    plans = SharedPlans()
    assert plans.next_step(alone, 1) is None
    together = plans.next_step(alone, 8)
    assert together is not None
    assert plans.next_step(alone, 9) is None, "counted in powers of two"
    for _ in range(PATIENCE_STEPS - 1):
        assert plans.next_step(alone, 1) is None
    assert plans.next_step(alone, 8) is None, "somebody had missed a step"
    for _ in range(PATIENCE_STEPS - 1):
        assert plans.next_step(alone, 1) is None
    assert plans.next_step(alone, 1) is alone
    assert plans.next_step(alone, 8) is together, "made once"


def test_a_new_plan_for_one_makes_a_new_one_for_several() -> None:
    plans = SharedPlans()
    before = plans.next_step(make_plan(TRANSFER_LIMITED), 8)
    plans.follow_alone()
    larger = equal_blocks(24, copies_to_compute=32.0, budget_blocks=6.0)
    after = plans.next_step(make_plan(larger), 8)
    assert before is not None
    assert after is not None
    assert after.given.budget_bytes > before.given.budget_bytes
