"""Without a flush, on ranks of several stages, closed forms equal counts over the order."""

import pytest

from jpipe import InputError, Plan, lower, simulate
from jpipe.schedules import SCHEDULES
from jpipe.schedules._interleaved import endless_done
from tests.jpipe.schedules.pricing import order_of, plan_of


def counted(plan, p, replica, batches):
    """Return (stage, microbatch, number of backwards that the rank has done at that stage) for each forward of a rank."""
    done = dict.fromkeys(plan.pipeline_ranks[p], 0)
    forwards = []
    for entry in order_of(plan, p, replica, batches):
        if entry.is_forward:
            forwards.append((entry.stage, entry.microbatch, done[entry.stage]))
        done[entry.stage] += entry.finishes
    return forwards


def check_done(ranks, chunks, replicas=1):
    plan = plan_of("pipedream", ranks, chunks, 2 * ranks * replicas, replicas=replicas)
    batches = 5 + chunks
    for p in range(ranks):
        for replica in range(replicas):
            for s, k, done in counted(plan, p, replica, batches):
                assert endless_done(plan, s, k) == done, (ranks, chunks, s, k)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_the_closed_form_of_backwards_done_is_what_the_order_does(ranks, chunks):
    check_done(ranks, chunks)
    check_done(ranks, chunks, replicas=2)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", range(1, 9))
def test_the_closed_form_of_backwards_done_is_what_the_order_does_for_more_ranks(ranks):
    for chunks in range(1, 5):
        check_done(ranks, chunks)


def legal_by_counting(ranks, chunks, per_replica, replicas):
    """Return whether two versions are enough.

    They are if all of batch t - 2 has been done at its stage before each forward of batch t, and with several replicas one microbatch more,
    so that the sum over them has had time.
    """
    plan = plan_of("looped_bfs", ranks, chunks, per_replica * replicas, replicas=replicas)  # of the same shape, and legal for any m
    for p in range(ranks):
        done = dict.fromkeys(plan.pipeline_ranks[p], 0)
        for entry in SCHEDULES["pipedream_2bw"].order(plan, p, range(0, 8 * ranks * per_replica * replicas, replicas)):
            s, batch = entry.stage, entry.microbatch // (per_replica * replicas)
            if entry.is_forward and batch > 1 and (batch - 1) * per_replica + (replicas > 1) > done[s]:
                return False
            done[s] += entry.finishes
    return True


@pytest.mark.parametrize(("ranks", "least"), [(1, 1), (2, 2), (3, 5), (4, 6)])
@pytest.mark.parametrize("chunks", [2, 3])
def test_2bw_in_chunks_is_legal_where_two_versions_are_enough(ranks, least, chunks):
    for replicas, needed in ((1, least), (2, 2 * ranks)):
        legal = [per_replica for per_replica in range(1, needed + 5) if legal_by_counting(ranks, chunks, per_replica, replicas)]
        assert legal == list(range(needed, needed + 5))
        assert plan_of("pipedream_2bw", ranks, chunks, needed * replicas, replicas=replicas)
        if needed > 1:
            with pytest.raises(
                InputError, match=rf"needs at least {needed * replicas} microbatches .*, found microbatches {(needed - 1) * replicas}"
            ):
                plan_of("pipedream_2bw", ranks, chunks, (needed - 1) * replicas, replicas=replicas)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "least"), [(5, 9), (6, 10), *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in ((7, 13), (8, 14)))]
)
def test_2bw_in_chunks_is_legal_where_two_versions_are_enough_for_more_ranks(ranks, least):
    test_2bw_in_chunks_is_legal_where_two_versions_are_enough(ranks, least, 2)


@pytest.mark.parametrize(("schedule", "ranks", "chunks", "m"), [("pipedream", 3, 2, 3), ("pipedream", 2, 3, 5), ("pipedream_2bw", 3, 2, 5)])
def test_versions_read_are_those_of_the_backwards_done(schedule, ranks, chunks, m):
    """Weight stashing reads the newest version; 2BW reads the version before that of the batch."""
    plan = plan_of(schedule, ranks, chunks, m)
    for p in range(ranks):
        for s, k, done in counted(plan, p, 0, 6):
            expected = done // m if schedule == "pipedream" else max(k // m - 1, 0)
            assert SCHEDULES[schedule].version(plan, s, k) == expected
    alive = simulate(lower(plan, 8)).versions_alive
    assert list(alive) == [SCHEDULES[schedule].versions_alive(plan, s) for s in range(plan.depth)]


def test_after_flushed_batches_the_order_restarts():
    plan = plan_of("pipedream", 2, 2, 3, flush_first=2)
    anew = plan_of("pipedream", 2, 2, 3)
    for p in range(2):
        flushed = [entry for entry in order_of(plan, p, batches=7) if entry.microbatch >= 6]
        assert [entry._replace(microbatch=entry.microbatch - 6) for entry in flushed] == order_of(anew, p, batches=5)


@pytest.mark.parametrize(
    ("schedule", "fields", "message"),
    [
        (
            "gpipe",
            {"chunks_per_rank": 2},
            r"^plan: chunks_per_rank: the schedule 'gpipe' runs one stage on each rank, found 2; leave out chunks_per_rank, or use an "
            r"interleaved schedule such as 'interleaved_1f1b'$",
        ),
        (
            "zb_h1",
            {"chunks_per_rank": 4},
            r"the schedule 'zb_h1' runs one stage on each rank, found 4; leave out chunks_per_rank, or use an",
        ),
        (
            "zb_h1",
            {"ranks": [[0, 3], [1, 2]]},
            r"'zb_h1' needs one stage on each rank, in order; found ranks \[\[0, 3\], \[1, 2\]\]; leave out ranks, or use an",
        ),
        (
            "zb_h1",
            {"ranks": [[1], [0], [2], [3]]},
            r"'zb_h1' needs one stage on each rank, in order; found ranks \[\[1\], .*\[3\]\]; leave out ranks$",
        ),
        (
            "zb_v",
            {"num_stages": 3},
            r"^plan: the schedule 'zb_v' needs two stages on each rank, so an even number of stages, found 3; use 2 or 4 stages$",
        ),
        ("dualpipe_v", {"num_stages": 1}, r"so an even number of stages, found 1; use 2 stages$"),
        (
            "zb_v",
            {"chunks_per_rank": 1},
            r"'zb_v' runs two stages on each rank, in a V, found 1; use chunks_per_rank 2, or leave out chunks_per_rank$",
        ),
        (
            "zb_v",
            {"chunks_per_rank": 3},
            r"'zb_v' runs two stages on each rank, in a V, found 3; use chunks_per_rank 2, or leave out chunks_per_rank$",
        ),
        (
            "zb_v",
            {"chunks_per_rank": 4},
            r"'zb_v' runs two stages on each rank, in a V, found 4; use chunks_per_rank 2, or leave out chunks_per_rank$",
        ),
        ("zb_v", {"num_stages": 3, "chunks_per_rank": 2}, r"a multiple of chunks_per_rank 2, found 3; use 4 stages$"),
        (
            "zb_v",
            {"ranks": [[0, 2], [1, 3]]},
            r"'zb_v' needs ranks in a V: rank p of P runs the stages p and 2P - 1 - p; found ranks \[\[0, 2\], \[1, 3\]\]; leave out "
            r"ranks$",
        ),
        ("dualpipe_v", {"ranks": [[0, 2], [1, 3]], "microbatches": 4}, r"'dualpipe_v' needs ranks in a V"),
        (
            "interleaved_1f1b",
            {"ranks": [[0, 3], [1, 2]]},
            r"'interleaved_1f1b' needs the same number of stages on each rank, and stage s on rank s mod",
        ),
        (
            "dualpipe_v",
            {"microbatches": 3},
            r"'dualpipe_v' needs at least 4 microbatches for 4 stages on 2 ranks, found microbatches 3; raise microbatches or use fewer",
        ),
        ("dualpipe_v", {"microbatches": 6, "replicas": 2}, r"needs at least 8 microbatches for 4 stages on 2 ranks with 2 replicas, found"),
        (
            "zb_v",
            {"replicas": [1, 2, 2, 1], "microbatches": 4},
            r"'zb_v' with several stages on a rank needs equally many replicas of each",
        ),
        ("interleaved_zero_bubble", {"chunks_per_rank": 2, "replicas": [1, 2, 1, 2]}, r"needs equally many replicas of each"),
        (
            "pipedream_2bw",
            {"chunks_per_rank": 2, "microbatches": 1},
            r"'pipedream_2bw' needs at least 2 microbatches for 4 stages on 2 ranks",
        ),
        (
            "looped_bfs",
            {"chunks_per_rank": 3},
            r"expected a number of stages that is a multiple of chunks_per_rank 3, found 4; use 3 stages or chunks",
        ),
        (
            "looped_bfs",
            {"chunks_per_rank": 3, "layers": "abcdef"},
            r"expected a number of stages that is a multiple of chunks_per_rank 3, found 4; use 6 stages or chunks_per_rank 2$",
        ),
        (
            "interleaved_1f1b",
            {"chunks_per_rank": 8, "layers": "abcdef"},
            r"expected a number of stages that is a multiple of chunks_per_rank 8, found 4; use chunks_per_rank 4$",
        ),
        ("zb_v", {"layers": "a", "num_stages": 1, "chunks_per_rank": 2}, r"of chunks_per_rank 2, found 1; use more layers$"),
        (
            "interleaved_1f1b",
            {"chunks_per_rank": 2, "replicas": [1, 2, 2, 1], "microbatches": 4},
            r"ranks\.0: expected the same number of replicas for each of the rank's stages \[0, 2\], found \[1, 2\]; give these stages the "
            r"same",
        ),
        (
            "interleaved_1f1b",
            {"ranks": [[0, 2], [1, 4]]},
            r"ranks: expected each of the stages 0 to 3 once, .*, found .*; put each stage on one rank, or remove the field ranks$",
        ),
        (
            "interleaved_1f1b",
            {"ranks": [[2, 0], [1, 3]]},
            r"ranks\.0: expected the stages of a rank in order, found \[2, 0\]; use \[0, 2\]$",
        ),
        ("looped_bfs", {"chunks_per_rank": 0}, r"chunks_per_rank: expected an integer of 1 or more, found 0"),
        ("looped_bfs", {"layers": "abc"}, r"expected between 1 and 3 stages \(the number of layers\), found 4"),
    ],
)
def test_ranks_that_a_schedule_cannot_use_are_refused(schedule, fields, message):
    with pytest.raises(InputError, match=message):
        Plan.even(**{"layers": "abcd", "num_stages": 4, "schedule": schedule, "microbatches": 2} | fields)
