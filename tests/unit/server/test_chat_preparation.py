"""The order in which chats are prepared."""

import asyncio
import threading

from server.limits.accounts import Accounts
from server.limits.jobs import Jobs
from server.limits.owners import ANYONE
from server.request_builder import in_thread


async def test_chats_that_bring_a_template_keep_no_thread_from_the_others() -> None:
    """Independent of the number and duration of other chats."""
    release = threading.Event()
    jobs = Jobs(Accounts()).of(ANYONE)
    slow = [asyncio.create_task(in_thread(jobs, "{{ 1 }}", lambda watch: release.wait())) for _ in range(64)]
    try:
        await asyncio.sleep(0)
        assert await asyncio.wait_for(in_thread(jobs, None, lambda watch: "text"), timeout=60) == "text"
    finally:
        release.set()
    assert all(await asyncio.gather(*slow))
    jobs.pools.close()
