"""Requests of a replica that does not return: which continue on another one, when, and with which tokens. Cores are
stubs."""

from collections.abc import Iterator

import pytest

from engine.client.placement import LIVE_TOKENS
from engine.client.relocation import UNAVAILABLE_SECONDS
from engine.messages import AddRequest
from tests.unit.stub_supervisors import LONGEST_START, Cluster, StubSupervisor


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(2) as cluster:
        yield cluster


@pytest.fixture
def three() -> Iterator[Cluster]:
    with Cluster(3) as cluster:
        yield cluster


def sent(stub: StubSupervisor, request_id: int) -> AddRequest:
    """The messages to the core about a request."""
    return stub.core[request_id]


# -- what moves, and when ---------------------------------------------------------------------------------------


def test_requests_of_a_replica_that_stays_away_go_on_in_another_behind_their_tokens(cluster: Cluster):
    first, second = cluster.stubs
    cluster.add(0, 1, to=1)
    second.step()
    cluster.add(2, to=1)
    second.lose(None)
    cluster.poll()
    assert cluster.homes() == {0: 1, 1: 1, 2: 1}, "it may be back in a moment"
    cluster.stay_away()
    assert cluster.homes() == {0: 0, 1: 0, 2: 0}
    assert [len(sent(first, request_id).resumed_token_ids) for request_id in range(3)] == [1, 1, 0]
    assert not any(sent(first, request_id).suspect for request_id in range(3))
    assert cluster.moves == [(2, 0)]
    cluster.until_ended(0, 1, 2)
    cluster.assert_complete(0, 1, 2)


def test_a_replica_that_is_back_soon_keeps_its_requests(cluster: Cluster):
    second = cluster.stubs[1]
    cluster.add(0, to=1)
    second.step()
    second.lose(None)
    cluster.stay_away(UNAVAILABLE_SECONDS - 1)
    second.serve()
    cluster.stay_away(LONGEST_START)
    assert cluster.homes() == {0: 1}
    cluster.until_ended(0)
    cluster.assert_complete(0)
    assert not cluster.moves


def test_a_replica_that_returns_has_none_of_what_moved_and_gets_new_requests(cluster: Cluster):
    first, second = cluster.stubs
    cluster.add(0, 1, 2, 3, to=1)
    second.step()
    second.lose(None)
    cluster.stay_away()
    second.serve()
    assert not second.core
    assert first.core.keys() == {0, 1, 2, 3}
    cluster.add(4, 5)
    assert [cluster.homes()[request_id] for request_id in (4, 5)] == [1, 1], "the other has more to do"
    cluster.until_ended(*range(6))
    cluster.assert_complete(*range(6))


def test_what_a_core_still_has_does_not_move_however_long_it_is_stuck(cluster: Cluster):
    second = cluster.stubs[1]
    cluster.add(0, to=1)
    second.step()
    second.stall()
    cluster.stay_away(2 * LONGEST_START)
    assert cluster.homes() == {0: 1}, "it might yet bring a token"
    second.lose(None)
    cluster.poll()
    assert cluster.homes() == {0: 0}, "it was away all the time"
    cluster.until_ended(0)
    cluster.assert_complete(0)


def test_without_another_that_serves_they_wait_and_move_once_one_has_served_for_a_while(cluster: Cluster):
    first = cluster.stubs[0]
    cluster.add(0, to=1)
    cluster.add(1, to=0)
    for stub in cluster.stubs:
        stub.step()
        stub.lose(None)
    cluster.stay_away(LONGEST_START)
    cluster.add(2, 3)
    assert set(cluster.homes()) == {0, 1, 2, 3}
    first.serve()
    cluster.poll()
    assert cluster.homes()[0] == 1, "the other may be back in the same moment"
    cluster.stay_away()
    assert set(cluster.homes().values()) == {0}
    cluster.until_ended(0, 1, 2, 3)
    cluster.assert_complete(0, 1, 2, 3)


def test_choices_of_one_prompt_move_together(three: Cluster):
    prompt = [7] * 100
    three.add(*range(4), to=2, prompt=prompt)
    three.add(*range(10, 16), to=2)
    three.stubs[2].step()
    three.stubs[2].lose(None)
    three.stay_away()
    homes = three.homes()
    assert len({homes[request_id] for request_id in range(4)}) == 1
    assert set(homes.values()) == {0, 1}, "the others are shared out"
    three.until_ended(*homes)
    three.assert_complete(*homes)


def test_all_that_a_request_is_goes_with_it(cluster: Cluster):
    first, second = cluster.stubs
    cluster.add(0, to=1, seed=5, temperature=0.7, logprobs=2, prompt_logprobs=1)
    request = sent(second, 0)
    second.step()
    second.lose(None)
    cluster.stay_away()
    moved = sent(first, 0)
    assert moved.prompt_token_ids == request.prompt_token_ids
    params, before = moved.sampling_params, request.sampling_params
    assert (params.seed, params.temperature, params.logprobs) == (before.seed, before.temperature, before.logprobs)
    assert params.prompt_logprobs is None, "it came with the first token"


def test_what_is_aborted_while_its_replica_is_away_ends_at_once_and_does_not_move(cluster: Cluster):
    first, second = cluster.stubs
    cluster.add(0, 1, to=1)
    second.step()
    second.lose(None)
    cluster.manager.abort([0])
    assert cluster.ends[0].finish_reason == "abort"
    cluster.stay_away()
    assert first.core.keys() == {1}
    cluster.manager.abort([1])
    first.step()
    assert cluster.ends[1].finish_reason == "abort"


def test_a_paused_request_moves_and_stays_paused_until_it_is_resumed(cluster: Cluster):
    first, second = cluster.stubs
    cluster.add(0, to=1)
    second.step()
    cluster.manager.pause([0])
    second.lose(None)
    cluster.stay_away()
    assert cluster.homes() == {0: 0}
    assert not first.core
    cluster.manager.resume([0])
    cluster.until_ended(0)
    cluster.assert_complete(0)


def test_the_load_of_what_moved_is_its_new_replica_s(cluster: Cluster):
    placement = cluster.manager._placement
    assert placement is not None
    cluster.add(0, 1, to=1, prompt=[7] * 50)
    cluster.stubs[1].step()
    before = placement.load(1)
    cluster.stubs[1].lose(None)
    cluster.manager.pause([1])
    cluster.stay_away()
    assert placement.load(1) == 0
    assert placement.load(0) == before / 2 + 50 + 1, "prompt and token are computed again"
    cluster.manager.resume([1])
    cluster.stubs[0].step()
    cluster.stubs[0].lose(None)
    cluster.stubs[0].serve()
    assert placement.load(0) == 2 * (LIVE_TOKENS + 50 + 2), "it knows what they have generated since"
    cluster.until_ended(0, 1)
    assert placement.load(0) == placement.num_live == 0


def test_replicas_in_lockstep_keep_their_requests():
    with Cluster(2, enable_expert_parallel=True) as cluster:
        cluster.add(0, to=1)
        cluster.stubs[1].lose(None)
        cluster.stay_away(2 * LONGEST_START)
        assert cluster.homes() == {0: 1}


def test_nothing_moves_while_the_engine_is_shut_down(cluster: Cluster):
    cluster.add(0, to=1)
    cluster.stubs[1].step()
    cluster.stubs[1].lose(None)
    cluster.pass_time(UNAVAILABLE_SECONDS)
    cluster.manager.shutdown()
    assert not cluster.moves
    assert cluster.ends[0].finish_reason == "error"


# -- who may be at fault ----------------------------------------------------------------------------------------


def test_who_was_in_the_step_that_a_core_died_in_waits_for_its_own(cluster: Cluster):
    second = cluster.stubs[1]
    cluster.add(0, 1, to=1)
    second.step()
    cluster.add(2, to=1)
    second.lose([0, 1])
    cluster.stay_away(LONGEST_START - 1)
    assert cluster.homes() == {0: 1, 1: 1, 2: 0}
    second.serve()
    assert second.untried == [0, 1]
    cluster.until_ended(0, 1, 2)
    cluster.assert_complete(0, 1, 2)


def test_where_no_start_takes_that_long_others_try_them_one_at_a_time_and_alone(cluster: Cluster):
    first, second = cluster.stubs
    cluster.add(0, 1, 2, to=1)
    second.step()
    second.lose([0, 1, 2])
    for request_id in range(3):
        cluster.stay_away(LONGEST_START + 1)
        cluster.poll()
        assert first.untried == [request_id], "the next one after this one"
        first.step()
    assert set(cluster.homes().values()) == {0}
    cluster.until_ended(0, 1, 2)
    cluster.assert_complete(0, 1, 2)


@pytest.mark.parametrize(("killed", "deaths"), [(False, 2), (True, 3)])
def test_a_request_that_kills_cores_is_given_up_after_as_many_deaths_as_without_a_move(
    three: Cluster, killed: bool, deaths: int
):
    three.add(0, 1, to=2)
    three.stubs[2].step()
    home = three.stubs[2]
    died = []
    while 0 not in three.ends:
        died.append(home)
        home.lose(home.next_step(), killed=killed)
        if 0 in three.ends:
            break
        # Its replica and host never return.
        three.stay_away(LONGEST_START + 1)
        home = three.stubs[three.homes()[0]]
        assert home.untried == [0]
    assert three.ends[0].is_poison
    assert len(died) == deaths
    assert 1 not in three.ends, "who was innocent goes on"
    for stub in three.stubs:
        if not stub.is_serving:
            stub.serve()
    three.until_ended(1)
    three.assert_complete(1)


def test_a_request_that_is_lost_with_one_core_after_the_other_moves_no_more():
    """A request may cause the failure of hosts; each time, the step in which they failed is unknown."""
    with Cluster(5) as cluster:
        cluster.add(0, to=0)
        for lost in range(3):
            home = cluster.homes()[0]
            cluster.stubs[home].lose(None)
            cluster.stay_away(2 * LONGEST_START)
            assert (cluster.homes()[0] == home) == (lost == 2)
        cluster.stubs[home].serve()
        cluster.stubs[home].step()
        cluster.stubs[home].lose(None)
        cluster.stay_away()
        assert cluster.homes()[0] != home, "a token later it is as good as any"
        cluster.until_ended(0)
        cluster.assert_complete(0)


def test_other_choices_of_a_suspect_s_prompt_wait_with_it(three: Cluster):
    prompt = [7] * 100
    three.add(*range(4), to=2, prompt=prompt)
    three.add(4, to=2)
    three.stubs[2].lose([0])
    three.stay_away(LONGEST_START - 1)
    homes = three.homes()
    assert [homes[request_id] for request_id in range(4)] == [2] * 4, "each of them may do the same"
    assert homes[4] != 2
    three.stay_away(2)
    assert [request_id for stub in three.stubs for request_id in stub.untried] == [0]
    three.run(lambda: len(three.reported[0]) > 0)
    three.stay_away(1)
    assert 2 not in three.homes().values(), "it does nothing of the kind"
    three.until_ended(*range(5))
    three.assert_complete(*range(5))


def test_of_several_suspects_the_second_is_tried_when_it_is_known_what_became_of_the_first():
    with Cluster(4) as cluster:
        cluster.add(0, 1, 2, to=0)
        cluster.stubs[0].step()
        cluster.stubs[0].lose([0, 1, 2])
        cluster.stay_away(LONGEST_START + 1)
        for _ in range(3):
            cluster.poll()
        (tried,) = [stub for stub in cluster.stubs if stub.untried]
        tried.lose(tried.next_step())
        assert cluster.ends[0].is_poison
        for _ in range(3):
            cluster.stay_away(1)
        assert not any(stub.untried for stub in cluster.stubs), "nor while another has died of the first"
        tried.serve()
        cluster.poll()
        assert [request_id for stub in cluster.stubs for request_id in stub.untried] == [1]
        cluster.until_ended(1)
        cluster.poll()
        cluster.until_ended(2)
        cluster.assert_complete(1, 2)


@pytest.mark.parametrize("ends", ["token", "failure", "abort"])
def test_the_next_suspect_is_tried_as_soon_as_it_is_known_what_became_of_the_one_before(cluster: Cluster, ends: str):
    """No time passes between them: with a second for each, the requests of a large batch would wait for minutes."""
    first, second = cluster.stubs
    cluster.add(*range(4), to=1)
    cluster.add(4, to=0)
    second.step()
    second.lose(list(range(4)))
    cluster.stay_away(LONGEST_START + 1)
    for request_id in range(4):
        assert first.untried == [request_id]
        first.step([4])
        assert first.untried == [request_id], "nothing is known yet"
        if ends == "token":
            first.step()
        elif ends == "failure":
            first.fail(request_id)
        else:
            cluster.manager.abort([request_id])
            first.step()
    assert not first.untried
    left = {"token": range(5)}.get(ends, [4])
    cluster.until_ended(*left)
    cluster.assert_complete(*left)


def test_other_choices_of_a_suspect_s_prompt_follow_it_at_once(cluster: Cluster):
    first, second = cluster.stubs
    cluster.add(*range(3), to=1, prompt=[7] * 100)
    second.lose([0])
    cluster.stay_away(LONGEST_START + 1)
    assert list(first.core) == [0]
    first.step()
    assert list(first.core) == [0, 1, 2]


def test_a_request_that_is_in_no_step_when_its_cores_die_moves_no_more_after_the_third():
    """A core may die of a request's grammar, which is compiled while steps run."""
    with Cluster(5) as cluster:
        for number in range(5):
            cluster.add(10 + number, to=number)
        cluster.add(0, to=0)
        for died in range(3):
            home = cluster.homes()[0]
            cluster.stubs[home].lose([10 + home])
            cluster.stay_away()
            assert (cluster.homes()[0] == home) == (died == 2)
        cluster.stubs[home].serve()
        cluster.until_ended(0)
        cluster.assert_complete(0)
