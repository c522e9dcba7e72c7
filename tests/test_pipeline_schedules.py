"""Schedules on paper: their figures, and the properties that every one of them has."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from utils.costs import naive_pipeline_time, pipeline_bubble, pipeline_time, zero_bubble_time
from utils.pipeline import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Recompute,
    Step,
    bubble,
    check_schedule,
    complete,
    forward_only,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    peak_in_flight,
    recomputing,
    time_schedule,
    unit_cost,
    zero_bubble_h1,
)
from utils.pipeline.checks import play
from utils.pipeline.schedules import SendActivation

# p, m, makespan, bubble / ideal, bubble / total: with F = 1 and B = 2
GOLDEN = [
    (4, 4, 21, 0.75, 0.4286),
    (4, 8, 33, 0.375, 0.2727),
    (4, 16, 57, 0.1875, 0.1579),
    (8, 8, 45, 0.875, 0.4667),
    (8, 32, 117, 0.21875, 0.1795),
]


@pytest.mark.parametrize(("p", "m", "makespan", "of_ideal", "of_total"), GOLDEN)
@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
def test_gpipe_and_1f1b_take_the_same_time(make, p, m, makespan, of_ideal, of_total):
    timeline = time_schedule(make(p, m))
    assert timeline.duration == makespan == pipeline_time(p, m, 1, 2)
    assert (timeline.duration - 3 * m) / (3 * m) == of_ideal == pipeline_bubble(p, m)
    assert bubble(timeline) == pytest.approx(of_total, abs=5e-5)
    assert bubble(timeline) == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize(("p", "m"), [golden[:2] for golden in GOLDEN])
def test_gpipe_keeps_everything_and_1f1b_does_not(p, m):
    assert peak_in_flight(gpipe(p, m)) == [m] * p
    assert peak_in_flight(one_f_one_b(p, m)) == list(range(p, 0, -1))
    assert peak_in_flight(naive(p, m)) == [1] * p


@pytest.mark.parametrize(
    ("p", "m", "v", "makespan"),
    [(4, 8, 2, 28.5), (4, 8, 4, 26.25), (4, 16, 2, 52.5), (8, 32, 2, 106.5)],
)
def test_interleaved(p, m, v, makespan):
    timeline = time_schedule(interleaved(p, m, v))
    assert timeline.duration == makespan == pipeline_time(p, m, 1, 2, chunks=v)
    assert (timeline.duration - 3 * m) / (3 * m) == (p - 1) / (v * m) == pipeline_bubble(p, m, v)
    assert peak_in_flight(interleaved(p, m, v))[0] == p * v + p - 1


@pytest.mark.parametrize(
    ("p", "m", "makespan"), [(4, 8, 27), (4, 16, 51), (8, 16, 55), (8, 24, 79)]
)
def test_zero_bubble(p, m, makespan):
    schedule = zero_bubble_h1(p, m)
    timeline = time_schedule(schedule)
    assert timeline.duration == makespan == zero_bubble_time(p, m, 1, 1, 1)
    bubble_of_1f1b = time_schedule(one_f_one_b(p, m)).duration - 3 * m
    assert timeline.duration - 3 * m == bubble_of_1f1b / 3
    assert peak_in_flight(schedule) == [p] * p  # 1F1B's fullest stage has as many


def test_naive_one_works_and_the_others_wait():
    for p, m in [(1, 1), (2, 3), (4, 4)]:
        timeline = time_schedule(naive(p, m))
        assert timeline.duration == 3 * p * m == naive_pipeline_time(p, m, 1, 2)
        assert bubble(timeline) == pytest.approx(1 - 1 / p)


def test_recomputing_takes_a_forward_pass_more_unless_it_fits_into_the_bubble():
    assert time_schedule(recomputing(gpipe(1, 5))).duration == 5 * 4
    # All but the last stage recompute their first micro-batch while they wait for its gradient.
    assert time_schedule(recomputing(one_f_one_b(4, 8))).duration == 4 * (8 + 3) - 3


def test_messages_take_time_where_they_are_waited_for():
    """One micro-batch on p stages: every message of it is waited for."""
    assert time_schedule(gpipe(4, 1), message=0.5).duration == 3 * 4 + 6 * 0.5
    # In the steady state they travel while others compute.
    late = time_schedule(one_f_one_b(2, 20), message=0.25).duration - 3 * 21
    assert 0.5 <= late <= 20 * 0.5


# --- properties ---------------------------------------------------------------------------------

sizes = {"p": st.integers(1, 6), "m": st.integers(1, 12)}
PLAIN = [naive, gpipe, one_f_one_b, zero_bubble_h1]


@settings(deadline=None, max_examples=60)
@given(make=st.sampled_from(PLAIN), **sizes)
def test_every_schedule_is_right(make, p, m):
    limit = {naive: [1] * p, gpipe: [m] * p}.get(make, [min(p, m)] * p)
    check_schedule(make(p, m), in_flight=limit)
    check_schedule(recomputing(make(p, m)), in_flight=limit)
    check_schedule(forward_only(p, m))


@settings(deadline=None, max_examples=60)
@given(v=st.integers(1, 4), **sizes)
def test_every_interleaved_schedule_is_right(p, m, v):
    """In units in which a chunk's forward pass takes 1, so that sums are exact."""
    schedule = interleaved(p, m, v)
    check_schedule(schedule)
    took = time_schedule(schedule, unit_cost(v, 2 * v, chunks=v)).duration
    assert 3 * v * m <= took <= pipeline_time(p, m, v, 2 * v)
    if m % p == 0:
        assert took == 3 * v * m + 3 * (p - 1) == pipeline_time(p, m, v, 2 * v, chunks=v)
    if v == 1:
        assert took == pipeline_time(p, m, 1, 2)


@settings(deadline=None, max_examples=60)
@given(
    make=st.sampled_from(PLAIN), forward=st.integers(1, 5), backward=st.integers(1, 5),
    weight=st.integers(1, 5), **sizes,
)  # fmt: skip
def test_times_for_any_costs(make, p, m, forward, backward, weight):
    """No stage is faster than its work, none does two things at once, and dependencies hold."""
    schedule = make(p, m)
    whole = backward + weight
    timeline = time_schedule(schedule, unit_cost(forward, whole, weight))
    assert all(timeline.busy(stage) == m * (forward + whole) for stage in range(p))
    ends = {(event.rows[0], event.name): event for event in timeline.events}
    for micro in range(m):
        for stage in range(1, p):
            earlier, later = f"gpu{stage - 1}", f"gpu{stage}"
            assert ends[later, f"F{micro}"].start >= ends[earlier, f"F{micro}"].end
            assert ends[earlier, f"B{micro}"].start >= ends[later, f"B{micro}"].end
    expected = {
        naive: naive_pipeline_time(p, m, forward, whole),
        gpipe: pipeline_time(p, m, forward, whole),
        one_f_one_b: pipeline_time(p, m, forward, whole),
    }.get(make)
    assert expected in (None, timeline.duration)


@settings(deadline=None)
@given(p=st.integers(1, 8), more=st.integers(0, 20))
def test_zero_bubble_fills_two_thirds_of_the_bubble(p, more):
    """Where there are at least as many micro-batches as stages."""
    m = p + more
    assert time_schedule(zero_bubble_h1(p, m)).duration == 3 * m + p - 1


@settings(deadline=None)
@given(
    make=st.sampled_from(PLAIN), recompute=st.booleans(), data=st.data(), p=st.integers(1, 5),
    m=st.integers(2, 6),
)  # fmt: skip
def test_a_schedule_with_one_instruction_missing_or_twice_is_refused(make, recompute, data, p, m):
    schedule = recomputing(make(p, m)) if recompute else make(p, m)
    stage = data.draw(st.integers(0, p - 1))
    position = data.draw(st.integers(0, len(schedule[stage]) - 1))
    missing = [list(jobs) for jobs in schedule]
    del missing[stage][position]
    twice = [list(jobs) for jobs in schedule]
    twice[stage].insert(position, twice[stage][position])
    for wrong in (missing, twice):
        with pytest.raises(ValueError, match=f"stage {stage}"):
            check_schedule(wrong)


# --- what is refused ----------------------------------------------------------------------------


def test_a_deadlock_is_named():
    """Stage 0 wants the gradient of micro-batch 1 first, stage 1 sends that of 0 first."""
    forwards = [Forward(0), Forward(1)]
    orders = [
        [Forward(0), Backward(0), Forward(1), Backward(1)],
        [*forwards, Backward(0), Backward(1)],
    ]
    with pytest.raises(ValueError) as error:
        check_schedule(complete(orders))
    assert "deadlock: stage 0 waits for the gradient that B0 needs" in str(error.value)
    assert "stage 1 waits for the activation that F1 needs" in str(error.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda jobs: jobs[:-1], "does not end with a step"),
        (lambda jobs: [*jobs, SendActivation(9)], "does not end with a step"),
        (lambda jobs: [SendActivation(7), *jobs], "nothing to do with"),
        (
            lambda jobs: [Backward(0), *(j for j in jobs if j != Backward(0))],
            "Backward, Forward; this",
        ),
        (lambda jobs: [BackwardWeight(0), *jobs], "BackwardWeight, Forward, Backward; this"),
        (lambda jobs: [j for j in jobs if j != Forward(1)], "needs Forward, Backward or"),
    ],
)
def test_wrong_schedules_are_refused(change, said):
    schedule = gpipe(2, 3)
    schedule[0] = change(schedule[0])
    with pytest.raises(ValueError, match=said):
        check_schedule(schedule)


def test_too_much_memory_is_refused():
    with pytest.raises(ValueError, match="stage 0 keeps 8 micro-batches in flight, not 4"):
        check_schedule(gpipe(4, 8), in_flight=[4, 3, 2, 1])


def test_weights_before_the_input_are_refused():
    orders = [[Forward(0), BackwardWeight(0), BackwardInput(0)]]
    with pytest.raises(ValueError, match="in this order"):
        check_schedule(complete(orders))


def test_instructions_are_equal_by_kind_and_numbers():
    assert Forward(1) == Forward(1, 0) != Backward(1) and Forward(1) != Forward(1, 1)
    assert str(Forward(3)) == "F3" and str(BackwardWeight(2, 1)) == "W2.1" and str(Step()) == "step"
    with pytest.raises(dataclasses.FrozenInstanceError):
        Forward(1).micro = 2


def test_recomputation_comes_right_before_the_backward_pass():
    for make in (one_f_one_b, zero_bubble_h1):
        for jobs in recomputing(make(3, 4)):
            for position, job in enumerate(jobs):
                if isinstance(job, (Backward, BackwardInput)):
                    assert jobs[position - 1] == Recompute(job.micro)


def test_play_lists_every_instruction_once():
    schedule = interleaved(3, 4, 2)
    played = [(stage, job) for stage, job, *_ in play(schedule)]
    assert len(played) == sum(map(len, schedule)) == len(set(played))
