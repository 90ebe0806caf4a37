"""Predictions of kernels' times: the waits of a wave, and the result for a device."""

import pytest

pytest.importorskip("triton")

from models.ops.triton.configs import TARGETS
from tools.kernel_prediction import DEVICES, Timing, Work, predict, read_timing

MI300X = DEVICES["gfx942"]
LATENCY = round(MI300X.latency * MI300X.clock)

_AMD_LOOP = """
kernel:
	s_load_dwordx4 s[0:3], s[4:5], 0x0
	s_waitcnt lgkmcnt(0)
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
	{body}
	v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]
	s_cbranch_vccnz .LBB0_1
; %bb.2:
	s_endpgm
"""
_LOADS = ("global_load_dwordx4 v[4:7], v[0:1], off", "global_load_dwordx4 v[8:11], v[0:1], off")


def passed(*body: str) -> Timing:
    timing = read_timing(_AMD_LOOP.format(body="\n\t".join(body)), TARGETS["gfx942"])
    assert timing is not None
    return timing


def test_loads_that_are_waited_for_one_by_one_take_a_latency_each() -> None:
    together = passed(*_LOADS, "s_waitcnt vmcnt(0)")
    apart = passed(_LOADS[0], "s_waitcnt vmcnt(0)", _LOADS[1], "s_waitcnt vmcnt(0)")
    assert together.pass_bytes == apart.pass_bytes == 2 * 16 * 64
    assert LATENCY <= together.pass_cycles < LATENCY + 60
    assert 2 * LATENCY <= apart.pass_cycles < 2 * LATENCY + 60
    assert together.pass_busy == apart.pass_busy


def test_a_wait_for_all_but_one_load_leaves_the_latest_under_way() -> None:
    pipelined = passed("s_waitcnt vmcnt(0)", *_LOADS, "s_waitcnt vmcnt(1)")
    assert pipelined.pass_cycles < passed(*_LOADS, "s_waitcnt vmcnt(0)").pass_cycles + 20


def test_what_is_outside_the_loop_is_counted_once() -> None:
    assert passed(*_LOADS).outside_cycles >= round(MI300X.near * MI300X.clock)


_SASS_LOOP = """
.L_x_0:
        /*0010*/                   LDGSTS.E.BYPASS.128 [R97], desc[UR12][R28.64] ;
        /*0020*/                   LDGDEPBAR ;
        /*0030*/                   DEPBAR.LE SB0, {pending} ;
        /*0040*/                   HMMA.16816.F32.BF16 R56, R80, R52, RZ ;
        /*0050*/               @P0 BRA `(.L_x_0) ;
"""


def test_stages_of_asynchronous_copies_share_a_latency_on_nvidia() -> None:
    none, three = (read_timing(_SASS_LOOP.format(pending=pending), TARGETS["sm_90"]) for pending in ("0x0", "0x3"))
    assert none is not None
    assert three is not None
    latency = round(DEVICES["sm_90"].latency * DEVICES["sm_90"].clock)
    assert latency <= none.pass_cycles < latency + 60
    assert latency / 4 <= three.pass_cycles < latency / 4 + 60


def test_a_register_is_waited_for_where_it_is_read_on_nvidia() -> None:
    body = """
        /*0010*/                   LDG.E.128 R4, desc[UR12][R28.64] ;
        /*0020*/                   IADD3 R40, R41, 0x1, RZ ;
        /*0030*/                   FADD R9, R{register}, R9 ;
        /*0040*/                   EXIT ;
"""
    latency = round(DEVICES["sm_90"].latency * DEVICES["sm_90"].clock)
    for register, latencies in ((6, 2), (8, 1)):
        # The second load begins when the first one's register has been read, or immediately.
        twice = body.format(register=register) + body.format(register=register).replace("R4", "R12")
        timing = read_timing(twice, TARGETS["sm_90"])
        assert timing is not None
        assert latencies * latency <= timing.pass_cycles < latencies * latency + 60


def test_a_share_is_that_of_the_bytes_in_flight_that_the_memory_needs() -> None:
    """Little's law: each unit's only wave has 1 KiB in flight, and waits for nothing else."""
    work = Work("", programs=MI300X.units, passes=10, bytes=MI300X.units * 10 * 1024)
    found = predict(Timing(LATENCY, 40, 1024, 1000), work, MI300X, 1, 8)
    assert found.share == pytest.approx(MI300X.units * 1024 / (MI300X.bandwidth * MI300X.latency), rel=1e-3)
    assert found.limit == "latency"
    assert found.in_flight == pytest.approx(MI300X.units * 1024, rel=1e-3)
    assert found.seconds == pytest.approx(10 * MI300X.latency + 1000 / MI300X.clock, rel=1e-3)


def test_more_programs_than_fit_run_one_after_the_other() -> None:
    timing = Timing(LATENCY, 40, 1024, 0)
    one, three = (predict(timing, Work("", rounds * MI300X.units, 1, 1.0), MI300X, 4, 1).seconds for rounds in (1, 3))
    assert three == pytest.approx(3 * one)


def test_waves_that_are_busy_do_not_overlap() -> None:
    work = Work("", MI300X.units * 8, 10, bytes=1.0)
    waiting, busy = (predict(Timing(LATENCY, cycles, 1024, 0), work, MI300X, 4, 8) for cycles in (10, LATENCY))
    assert busy.seconds == pytest.approx(8 * waiting.seconds)


@pytest.mark.parametrize(("bytes_", "operations", "limit"), [(1e12, 0.0, "bandwidth"), (1.0, 1e18, "matrix")])
def test_nothing_is_faster_than_the_roofline(bytes_: float, operations: float, limit: str) -> None:
    found = predict(Timing(10, 10, 64, 0), Work("", 304, 1, bytes_, 0.0, operations), MI300X, 4, 8)
    assert (found.share, found.limit) == (1.0, limit)


def test_bytes_that_only_the_split_moves_lower_the_share() -> None:
    found = predict(Timing(10, 10, 64, 0), Work("", 304, 1, 8e9, extra=2e9), MI300X, 4, 8)
    assert found.share == pytest.approx(0.8)
