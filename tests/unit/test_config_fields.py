"""`Config.from_fields`: a section's fields may be given at the top level."""

import pytest
from pydantic import ValidationError

from engine.config.config import Config, ParallelConfig


def test_fields_of_sections_stand_beside_the_others() -> None:
    config = Config.from_fields(max_num_seqs=3, tensor_parallel_size=2, rank_start_timeout=5.0, port=8123)
    assert config.max_num_seqs == 3
    assert config.parallel_config == ParallelConfig(tensor_parallel_size=2, rank_start_timeout=5.0)
    assert config.server_config.port == 8123


def test_a_section_may_be_given_whole() -> None:
    parallel = ParallelConfig(tensor_parallel_size=2)
    assert Config.from_fields(parallel_config=parallel).parallel_config is parallel


def test_a_section_and_a_field_of_it_are_not_given_together() -> None:
    with pytest.raises(ValueError, match="parallel_config and its field tensor_parallel_size are both given"):
        Config.from_fields(parallel_config=ParallelConfig(), tensor_parallel_size=2)


def test_what_is_no_field_is_refused() -> None:
    with pytest.raises(ValidationError, match="tensor_parallel\n"):
        Config.from_fields(tensor_parallel=2)


def test_replicas_do_not_publish_events_where_another_one_answers_replays() -> None:
    given = {"kv_events_endpoint": "tcp://*:5557", "data_parallel_size": 2}
    with pytest.raises(ValidationError, match="adds its number to both ports; let them lie 2 or more apart"):
        Config.from_fields(**given, kv_events_replay_endpoint="tcp://*:5558")
    Config.from_fields(**given, kv_events_replay_endpoint="tcp://*:5559")
    # Events that are sent to a listener use no port of this host.
    Config.from_fields(
        **{**given, "kv_events_endpoint": "tcp://router:5557"}, kv_events_replay_endpoint="tcp://*:5558"
    )
